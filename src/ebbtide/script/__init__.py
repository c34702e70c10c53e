"""Any training script, switched from outside: the processes of ``ebbtide run`` and ``ebbtide compare -- COMMAND``.

[Note: any script]
The command runs as it is, with one environment variable more and one folder more in front of ``PYTHONPATH``. That
folder holds a ``sitecustomize``, which every Python process imports when it starts. It imports neither torch nor
ebbtide: it waits until the process has imported torch by itself, and only then is ``switch`` imported. A process that
never does (a launcher's helper, a tool) is left as it is.

[Note: where a script is switched]
A model is ready when it is called: by then it has its adapters, its wrappers (DDP, FSDP, ``accelerate.prepare``,
Lightning) and its final device, in whatever order the script did that. No earlier event has this in all scripts: DDP
is put on after the optimizer is made by some, before it by others, and a trainer does it inside ``train()``. And the
model that is trained is the one of which an optimizer holds parameters: a teacher, a reference or a reward model has
none there, whatever its ``requires_grad``. So the switch acts on the first call, with gradients, of an outermost
module that has parameters of an optimizer, before its forward begins: the first step is offloaded already, or a model
that does not fit would never reach the second. *Outermost* is what the script calls itself; a call inside another
module's call is not looked at. Several models (GAN, text encoder and transformer) are switched one by one. A single
layer, such as an embedding that the script calls ahead of the model, is no model: it has no parts.

``nn.Module.__call__`` is replaced for this, and only while it is needed: during an outermost call torch's own is back
in place, so that neither the layers nor Dynamo see anything, and once every optimizer has taken a step it stays. A
hook for all modules would be called too late (``forward`` has been looked up by then) and for each layer.
"""

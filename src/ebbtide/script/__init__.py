"""Any training script, switched from outside: the processes of ``ebbtide run`` and ``ebbtide compare -- COMMAND``.

[Note: any script]
The command runs unchanged, with one more environment variable and one more folder at the front of ``PYTHONPATH``. The
folder holds a ``sitecustomize``, which every Python process imports at startup. It imports neither torch nor ebbtide:
once the process has imported torch, it imports ``switch``. Processes that never import torch are unaffected.

[Note: where a script is switched]
When a model is called, it has its adapters, its wrappers (DDP, FSDP, ``accelerate.prepare``, Lightning) and its final
device. No earlier event guarantees this: scripts apply DDP before or after making the optimizer, and trainers inside
``train()``. The trained model is the one whose parameters an optimizer holds; a teacher, reference or reward model has
none there, whatever its ``requires_grad``. So the switch acts on the first call, with gradients, of an outermost module
that has parameters of an optimizer, before its forward: a model that does not fit would never reach a second step. A
frozen model that reads what a switched one computed, such as the U-Net behind a ControlNet, saves as much as if it were
trained, and is switched as well.
*Outermost* modules are called by the script itself, not inside another module's call. Several models (GAN, text encoder
and transformer) are switched one by one. A single layer without submodules, such as an embedding that the script calls
first, is not switched. A script may call the blocks of a model one by one, as Lightning's ``training_step`` and other
methods of a model do: the first one is found in its stack, and the stack is switched in place of the model. Nobody
knows that model: what is compared and counted of its other parameters are those that the optimizers hold.

For this ``nn.Module.__call__`` is replaced, but only outside of calls and until every optimizer has taken a step:
during an outermost call torch's own is restored, so neither the layers nor Dynamo see the replacement (unless the
script patches it, too: [Note: patches of calls]). A global module hook would run too late (after ``forward`` was looked
up) and for each layer.
"""

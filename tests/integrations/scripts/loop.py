"""A training loop of a user, in the shape that the first argument names, without ebbtide."""

import contextlib
import gc
import os
import sys
import weakref

import torch
from torch import nn


class Layers(nn.Module):
    def __init__(self, outputs=8):
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)  # noqa: E731
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList([layer() for _ in range(3)])
        self.head = nn.Linear(32, outputs)

    def forward(self, x):
        x = self.embedding(x) if x.dtype == torch.long else x
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batches(count=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(50, (8, 64), generator=generator) for _ in range(count)]


def plain():
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def stages():
    """Two optimizers of one model, in sequence."""
    model = Layers()
    stages = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())]
    for optimizer, x in zip([stages[0]] * 2 + [stages[1]] * 4, batches(), strict=True):
        loss = model(x).square().mean()
        print("loss", loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def forked():
    """A child forked in the middle trains on by itself."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, x in enumerate(batches()):
        child = os.fork() if number == 3 else None
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if child == 0:
            print("the child's last line", flush=True)
            os._exit(0)
        elif child:
            assert os.waitpid(child, 0)[1] == 0


def abrupt():
    plain()
    print("the script's last line", flush=True)
    os._exit(0)


def replaced():
    """Another program takes the process over; one that cannot, in the middle, does not."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, x in enumerate(batches()):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            with contextlib.suppress(FileNotFoundError):
                os.execvp("no such program", ["no such program"])
    print("the script's last line", flush=True)
    os.execl(sys.executable, sys.executable, "-c", "print('the next program')")


def scaled(kind=torch.amp.GradScaler):
    """Under a scaler, which skips the second step; the optimizer's state holds more than tensors."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state["scaled"] = True
    scaler = kind("cpu")
    for number, x in enumerate(batches()):
        loss = model(x).square().mean() * (float("inf") if number == 1 else 1.0)
        print("loss", loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def sharded_scaler():
    """The same under FSDP1's scaler, in a group of one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    scaled(ShardedGradScaler)
    dist.destroy_process_group()


def accumulated():
    """Two micro-batches per step, an occasional evaluation with gradients, and an embedding called ahead."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        for part in x.chunk(2):
            embedded = model.embedding(part)
            (model(embedded).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        model(x)
        model.train()


def accumulated_closure():
    """Like Lightning with accumulate_grad_batches: the last micro-batch of a step is inside ``optimizer.step``."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        parts = iter(x.chunk(2))

        def compute(parts=parts):
            loss = model(next(parts)).square().mean()
            loss.backward()
            return loss

        compute()
        optimizer.step(closure=compute)
        optimizer.zero_grad()


def closure():
    """Like Lightning: forward and backward inside ``optimizer.step``."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():

        def compute(x=x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(compute)


def released():
    """Gradient release: an optimizer steps for each weight within the backward; its step after that does nothing."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    released_each(model, dict.fromkeys(model.parameters(), optimizer), after=optimizer.step)


def released_each(model=None, optimizers=None, after=lambda: None):
    """Gradient release with an optimizer for each weight."""
    model = model or Layers()
    optimizers = optimizers or {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def release(weight):
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(release)
    for x in batches():
        model(x).square().mean().backward()
        after()


def iterated():
    """Losses passed as an iterator."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        losses = [model(x).square().mean()]
        torch.autograd.backward(iter(losses))
        assert model.head.weight.grad is not None
        optimizer.step()
        optimizer.zero_grad()


def fused():
    """Like LOMO: the optimizer's own backward updates the weights, and it takes no step."""

    class Fused(torch.optim.Optimizer):
        def fused_backward(self, loss):
            loss.backward()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None

    model = Layers()
    optimizer = Fused(model.parameters(), {})
    for x in batches():
        optimizer.fused_backward(model(x).square().mean())


def edges():
    """Losses passed as edges of the graph."""
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(model(x).square().mean())])
        optimizer.step()
        optimizer.zero_grad()


def actor_critic():
    """Two models on one trunk."""
    trunk = Layers(32)
    actor, critic = nn.Sequential(trunk, nn.Linear(32, 4)), nn.Sequential(trunk, nn.Linear(32, 1))
    optimizer = torch.optim.SGD([*trunk.parameters(), *actor[1].parameters(), *critic[1].parameters()], lr=0.1)
    for x in batches():
        (actor(x).square().mean() + critic(x).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def folds():
    """A model and an optimizer for each fold."""
    models = weakref.WeakSet()

    def fold():
        model = Layers()
        models.add(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(int(sys.argv[2]) if sys.argv[2:] else 2):
        fold()
    print("models left:", len(models))


def method():
    """Like Lightning's ``training_step``: a method of the model calls its layers; another stage is of two models."""
    model = Layers()
    if sys.argv[2:]:  # a weight outside of the layers, which the losses do not show
        model.unused = nn.Parameter(torch.full((3,), float(sys.argv[2])))
    model.layers.extend(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3))
    model.later = nn.ModuleList([Layers(32), Layers(32)])
    layer_by_layer(model, [*model.layers, *model.later])


def listed():
    """The layers are in no module."""
    model = Layers()
    layers = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(6)]
    model.extra = nn.ParameterList(p for layer in layers for p in layer.parameters())
    layer_by_layer(model, layers)


def layer_by_layer(model, layers):
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        x = model.embedding(x)
        for layer in layers:
            x = layer(x)
        model.head(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adversaries():
    """Two models with an optimizer each, and a frozen teacher that is called first."""
    teacher, generator, critic = Layers(32), Layers(32), Layers(1)
    first = torch.optim.AdamW(critic.parameters())
    second = torch.optim.AdamW(generator.parameters())
    for x in batches():
        target = teacher(x).detach()
        made = generator(x)
        first.zero_grad()
        (critic(target).mean() - critic(made.detach()).mean()).backward()
        first.step()
        second.zero_grad()
        critic(made).mean().backward()
        second.step()


def passed():
    """A frozen model reads what the trained one made, as the U-Net behind a ControlNet; a teacher does not."""
    frozen, model = Layers().requires_grad_(False), Layers(32)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        target = frozen(x)
        made = model(x)
        (frozen(made) - target).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def outer():
    """The encoder is called by itself before the whole model is."""
    inner = Layers(32)
    model = nn.Sequential(inner, Layers())
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        (inner(x).mean() + model(x).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled():
    model = Layers()
    for layer in model.layers:
        layer.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_whole():
    """A compiled model without blocks."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    model.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        model(x[:, :32].float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def compiled_step():
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="eager")
    def step():
        optimizer.step()

    for x in batches():
        model(x).square().mean().backward()
        step()
        optimizer.zero_grad()


def compiled_function():
    """Only compiled code calls the model."""
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="eager", fullgraph=True)
    def loss_of(x):
        return model(x).square().mean()

    for x in batches():
        loss_of(x).backward()
        optimizer.step()
        optimizer.zero_grad()


def probed():
    """A probe of the model's outputs, a single layer, trains for many steps in the middle."""
    model, probe = Layers(), nn.Linear(8, 1)
    optimizer, of_probe = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, probe))
    for number, x in enumerate(batches()):
        loss = model(x).square().mean()
        print("loss", loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        before = sum(type(each) is torch.Tensor for each in gc.get_objects())
        for _ in range(5000 if number == 2 else 0):
            probe(torch.ones(1, 8)).sum().backward()
            of_probe.step()
        gc.collect()
        print("more tensors:", sum(type(each) is torch.Tensor for each in gc.get_objects()) - before)


def doubled():
    """The head's output is doubled, by a hook."""
    model = Layers()
    model.head.register_forward_hook(lambda module, inputs, output: output * 2)
    descend(model, torch.optim.SGD(model.parameters(), lr=0.1))


def patched():
    """The same by a patch of ``__call__``: before or after the optimizer is made, around what is there or torch's."""
    when, around = sys.argv[2:]
    call, model = nn.Module.__call__, Layers()
    if when == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = nn.Module.__call__ if around == "there" else call

    def doubling(module, *args, **kwargs):
        output = call(module, *args, **kwargs)
        return output * 2 if module is model.head else output

    nn.Module.__call__ = doubling
    if when == "before":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    descend(model, optimizer)
    assert nn.Module.__call__ is doubling


def descend(model, optimizer):
    for x in batches():
        loss = model(x).square().mean()
        print("loss", loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def unreadable():
    """A parameter without bytes, like that of a part that was never loaded."""
    model = Layers()
    model.unused = nn.Linear(4, 4, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def crash():
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    for number, x in enumerate(batches()):
        model(x).square().mean().backward()
        optimizer.step()
        if number == 2:
            raise ValueError("the script's own error")


def own():
    import ebbtide

    model = Layers()
    ebbtide.enable_activation_offloading(model, policy="minimal", min_bytes=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def inference():
    with torch.no_grad():
        Layers()(batches()[0])


def by_hand():
    """No optimizer of torch's."""
    model = Layers()
    for x in batches():
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad)
                parameter.grad = None


def copies():
    """An optimizer of copies of the parameters."""
    model = Layers()
    optimizer = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])
    for x in batches():
        model(x).square().mean().backward()
        for copy, parameter in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True):
            copy.grad = parameter.grad
        optimizer.step()


def unseeded():
    torch.seed()
    plain()


def accelerated():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Layers()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for x in batches(12):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def distributed():
    """DDP, put on before the optimizer is made; each rank has rows of its own."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Layers())
    optimizer = torch.optim.AdamW(model.parameters())
    for x in batches():
        model(x.roll(dist.get_rank(), 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("the script's last line")

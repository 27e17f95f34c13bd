"""Pieces that couple samples by hooks, by what torch functions do not show, and clipping functions that do."""

from __future__ import annotations

from .pieces import ESCAPES, add
from .wrong import LAYER, wrong


def escapes(name: str, lines: str, init: str = "", **options: object) -> None:
    add(name, ESCAPES, "body", lines, init, **options)


# --------------------------------------------------------------------------- hooks
HOOK = "h = torch.tanh(h)\nif h.requires_grad:\n    h.register_hook(lambda g: FUNCTION)"
for name, function in {
    "over its norm": "g / g.norm()",
    "plus its sum": "g + 3 * g.sum(0)",
    "by its max": "g / g.abs().max()",
    "flipped": "g.flip(0)",
    "by place": "g * torch.arange(1, len(g) + 1).to(g).view(-1, *[1] * (g.dim() - 1))",
    "times len": "g * len(g)",
    "centred": "g - g.mean(0)",
    "clipped in all": "g * min(1.0, 0.01 / float(g.norm()))",
    "in place": "g.div_(g.norm())",
    "sign of the sum": "g * g.sum().sign()",
}.items():
    wrong("hook: gradient " + name, HOOK.replace("FUNCTION", function))
wrong(
    "full backward hook",
    "h = self.UU(h)",
    LAYER + "; self.UU.register_full_backward_hook(lambda m, a, b: tuple(v / v.norm() for v in a))",
)
wrong(
    "full backward pre-hook",
    "h = self.UU(h)",
    LAYER + "; self.UU.register_full_backward_pre_hook(lambda m, b: tuple(v - v.mean(0) for v in b))",
)
wrong(
    "forward hook that mixes",
    "h = self.UU(h)",
    LAYER + "; self.UU.register_forward_hook(lambda m, a, b: b - b.mean(0))",
)
escapes(
    "hook: normed by sample in a mean",
    "h = h * CC\nif h.requires_grad:\n    h.register_hook("
    "lambda g: g / (1e-9 + g.flatten(1).norm(dim=1).view(-1, *[1] * (g.dim() - 1))))",
    reduction="mean",
)
wrong(
    "hook on a node",
    "h = torch.tanh(h)\nif h.grad_fn is not None:\n"
    "    h.grad_fn.register_hook(lambda a, b: tuple(v / v.norm() for v in a))",
)
wrong(
    "pre-hook on a node",
    "h = torch.tanh(h)\nif h.grad_fn is not None:\n"
    "    h.grad_fn.register_prehook(lambda b: tuple(v / v.norm() for v in b))",
)
wrong(
    "multi-grad hook",
    "h = torch.tanh(h)\nif h.requires_grad:\n"
    "    torch.autograd.graph.register_multi_grad_hook([h], lambda g: g[0].div_(g[0].norm()))",
)

# --------------------------------------------------------------------------- layouts lost inside torch
wrong("data in place, mean", "y_ = torch.tanh(h)\ny_.data.sub_(y_.data.mean(0))\nh = y_")
wrong("data assigned", "y_ = torch.tanh(h)\ny_.data = y_.data - y_.data.mean(0)\nh = y_")
wrong("data read", "h = h - h.data.mean(0)")
wrong("set_", "y_ = torch.tanh(h).detach()\ny_.set_(y_ - y_.mean(0))\nh = h + y_")
wrong(
    "set_ on storage",
    "y_ = h.detach().clone()\ny_.set_((y_ - y_.mean(0)).untyped_storage(), 0, y_.shape, y_.stride())\nh = h + y_",
)
wrong("parameter of data", "z = nn.Parameter(h.detach())\nh = h - z.mean(0)")
wrong(
    "attention over a parameter of data",
    "z = nn.Parameter(h.detach().flatten(1))\nh = ((h.flatten(1) @ z.T).softmax(-1) @ z).view_as(h)",
)
wrong("subclass of data", "z = torch.Tensor._make_subclass(nn.Parameter, h.detach())\nh = h - z.mean(0)")
wrong("as_subclass", "z = h.detach().as_subclass(nn.Parameter)\nh = h - z.mean(0)")
escapes("numpy mean", "h = h - torch.from_numpy(h.detach().numpy().mean(0)).to(h)")
escapes("numpy in place", "z = torch.tanh(h).detach()\na = z.numpy()\na -= a.mean(0)\nh = h + z")
escapes("tolist and back", "h = h - torch.tensor(h.detach().tolist()).to(h).mean(0)")
escapes("dlpack", "z = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach()))\nh = h - z.mean(0)")
wrong(
    "as_strided",
    "z = h.flatten(1).contiguous()\nh = h + z.as_strided((len(z), z.shape[1]), (z.shape[1], 1), 0)"
    ".roll(1, 0).view_as(h)",
)
wrong(
    "storage of data",
    "z = torch.empty(0, dtype=h.dtype).set_(h.detach().contiguous().untyped_storage())\nh = h + z.view_as(h).mean(0)",
)
wrong("deepcopy", "import copy\nz = copy.deepcopy(h.detach())\nh = h - z.mean(0)")
wrong(
    "frombuffer",
    "z = torch.frombuffer(bytearray(h.detach().contiguous().numpy().tobytes()), dtype=h.dtype)\n"
    "h = h - z.view_as(h).mean(0)",
)
wrong("torch.tensor of items", "h = h * torch.tensor([float(v) for v in h.detach().flatten(1).sum(1)]).to(h).mean()")
wrong("out=", "z = torch.empty(h.shape[1:], dtype=h.dtype)\ntorch.mean(h.detach(), 0, out=z)\nh = h - z")
wrong("copy_ into a constant", "z = torch.zeros(h.shape[1:], dtype=h.dtype)\nz.copy_(h.detach().mean(0))\nh = h - z")
wrong("foreach", "z = torch._foreach_mul([h.detach()], 2.0)[0]\nh = h - z.mean(0)")
wrong("aten call", "h = h - torch.ops.aten.mean.dim(h.detach(), [0])")
escapes(
    "custom backward",
    "class Mix(torch.autograd.Function):\n    @staticmethod\n"
    "    def forward(ctx, v):\n        return v * 1.0\n"
    "    @staticmethod\n    def backward(ctx, g):\n        return g - g.mean(0)\nh = Mix.apply(h)",
)
escapes(
    "custom backward by its norm",
    "class Mix(torch.autograd.Function):\n"
    "    @staticmethod\n    def forward(ctx, v):\n"
    "        return v * 1.0\n    @staticmethod\n    def backward(ctx, g):\n"
    "        return g / g.norm()\nh = Mix.apply(h)",
)
escapes("array of numpy", "import numpy\nh = h * float(numpy.asarray(t).sum())")
wrong(
    "custom function",
    "class Mix(torch.autograd.Function):\n    @staticmethod\n"
    "    def forward(ctx, v):\n        return v - v.mean(0)\n"
    "    @staticmethod\n    def backward(ctx, g):\n        return g - g.mean(0)\nh = Mix.apply(h)",
)
wrong("scripted function", "h = mixing_script(h)")
wrong("sparse", "h = h - torch.sparse.sum(h.detach().to_sparse(), 0).to_dense()")
wrong(
    "nested tensor", "z = torch.nested.nested_tensor([v for v in h.detach()]).to_padded_tensor(0.0)\nh = h - z.mean(0)"
)
wrong("no torch function", "with torch._C.DisableTorchFunctionSubclass():\n    h = h - h.mean(0)")
escapes(
    "thread",
    "import threading\nbox = []\nz = h.detach()\n"
    "k = threading.Thread(target=lambda: box.append(z.mean(0)))\nk.start()\nk.join()\nh = h - box[0]",
)

# --------------------------------------------------------------------------- clipping functions (the optimizer's)
for name, function in {
    "below the median": "lambda n: (n <= n.median()).to(n)",
    "over the largest": "lambda n: (R / n.max()).clamp(max=1).expand_as(n)",
    "by rank": "lambda n: (R / n).clamp(max=1) * (n.argsort().argsort() % 2).to(n)",
    "by the mean": "lambda n: (R / n).clamp(max=1) * (n > n.mean()).to(n)",
    "by place": "lambda n: (R / n).clamp(max=1) * (torch.arange(len(n)) % 2).to(n)",
    "by the number": "lambda n: (R / n).clamp(max=1) * (1.0 if len(n) % 2 else -1.0)",
}.items():
    wrong("clipping " + name, "h = h * 1.0", clipping=function)
escapes(
    "tensor of a range",
    "h = h * torch.tensor([float(i) for i in range(len(h))]).to(h)" + ".view(-1, *[1] * (h.dim() - 1))",
)
escapes("branch on len", "h = h * 3 if len(h) % 2 else -h")

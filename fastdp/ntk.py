"""The empirical neural tangent kernel of a model under per-sample clipping: the effect of clipping on convergence.

The outputs f in R^(B C) are those of B samples with C outputs each; J_r = df/dw_r for the parameters w_r of layer r;
H_r = J_r J_r^T, H = sum_r H_r; g = dl/df for the samples' losses l. Gradient descent on clipped per-sample gradients,
in the limit of small learning rates, is dw_r/dt = -sum_i c_(r,i) dl_i/dw_r, so that

    df/dt = -K g   and   dL/dt = -g^T K g   for L = sum_i l_i,

with K = H without clipping, K = H diag(c) under flat clipping and K = sum_r H_r diag(c_r) under layerwise clipping.

H is symmetric and has no negative eigenvalue. H diag(c) is not symmetric, and its quadratic form can be negative (the
loss then rises). Its eigenvalues, which are those of diag(c)^(1/2) H diag(c)^(1/2), cannot be negative; those of the
sum can. Noise does not appear, because its mean is zero.

Source: Bu, Wang, Dai, Long: On the convergence and calibration of deep learning with differential privacy, TMLR 2023
(arXiv 2106.07830). `python -m fastdp ntk` measures its Table 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .engine.per_sample import PerSampleGradients
from .errors import SampleMixingError
from .ops.clip import GAMMA
from .optim.clipping import Clipping, ClippingFunction

Loss = Callable[[Tensor, Any], Tensor]


class Positivity(NamedTuple):
    """The result of `positivity`.

    The answers allow for `tolerance` of ||A||_2: a number that is not negative by more counts as not negative.

    Attributes:
        symmetric: whether A is symmetric.
        quadratic: whether x^T A x >= 0 for every x.
        eigenvalues: whether no eigenvalue has a negative real part.
        asymmetry: ||A - A^T|| / ||A|| (Frobenius).
        least_quadratic: the smallest eigenvalue of (A + A^T) / 2.
        least_eigenvalue: the smallest real part of an eigenvalue of A.
        tolerance: the share of ||A||_2 that is allowed.
    """

    symmetric: bool
    quadratic: bool
    eigenvalues: bool
    asymmetry: float
    least_quadratic: float
    least_eigenvalue: float
    tolerance: float


def positivity(matrix: Tensor, tolerance: float = 1e-9) -> Positivity:
    """Test whether A is symmetric, x^T A x >= 0 for every x, and no eigenvalue of A has a negative real part.

    Args:
        matrix: A, [N, N].
        tolerance: the allowance, as a share of the largest singular value.

    Raises:
        ValueError: if the matrix is not square, or contains NaN or infinity.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ValueError(f"a square matrix [N, N], not {tuple(matrix.shape)}")
    a = matrix.detach().double()
    if not bool(torch.isfinite(a).all()):
        raise ValueError("the matrix holds NaN or infinity")
    size = float(torch.linalg.matrix_norm(a, 2))
    whole = float(torch.linalg.matrix_norm(a))
    asymmetry = float(torch.linalg.matrix_norm(a - a.T)) / whole if whole else 0.0
    quadratic = float(torch.linalg.eigvalsh((a + a.T) / 2)[0])
    eigenvalue = float(torch.linalg.eigvals(a).real.min())
    low = -tolerance * size
    return Positivity(
        asymmetry <= tolerance, quadratic >= low, eigenvalue >= low, asymmetry, quadratic, eigenvalue, tolerance
    )


class NTK:
    """The empirical NTK of a model on a batch, in float64; `ntk` makes it. Rows are ordered by sample, then by output.

    Attributes:
        outputs: [B, C].
        losses: [B].
        gradients: g [B, C].
        kernels: {parameter: [B C, B C]}, the parts of H by parameter.
    """

    def __init__(
        self, named: dict[str, Tensor], jacobian: dict[str, Tensor], outputs: Tensor, losses: Tensor, gradients: Tensor
    ) -> None:
        self.outputs, self.losses, self.gradients = outputs, losses, gradients
        self.kernels = {name: part @ part.T for name, part in jacobian.items()}
        self._named = named

    @property
    def size(self) -> tuple[int, int]:
        """(B, C), the numbers of samples and outputs."""
        return self.outputs.shape[0], self.outputs.shape[1]

    @property
    def matrix(self) -> Tensor:
        """H [B C, B C], the kernel without clipping."""
        return self._sum(self.kernels)

    @property
    def layers(self) -> dict[str, Tensor]:
        """{layer: H_r} for the layers of layerwise clipping, by owning module."""
        return {group.name: self._sum(group.parameters) for group in Clipping(self._named, style="layerwise").groups}

    def clipping(
        self,
        clipping: ClippingFunction = "local",
        max_grad_norm: float = 1.0,
        style: str | Sequence[Any] = "flat",
        gamma: float = GAMMA,
    ) -> Clipping:
        """The clipping of an optimizer with these arguments; see `fastdp.optim.clipping.Clipping`."""
        return Clipping(self._named, clipping, max_grad_norm, style, gamma)

    def norms(self, clipping: Clipping) -> list[Tensor]:
        """The norms [B] of the per-sample gradients of each group: sqrt(g_i^T H_(r,ii) g_i)."""
        return [squares.sqrt() for squares in self._norm_sq(clipping)]

    def factors(self, clipping: Clipping) -> dict[str, Tensor]:
        """{group: c_r [B]}, the factors of training (float32 with a margin for rounding), as float64."""
        found = clipping.factors(self._norm_sq(clipping))
        return {group.name: c.double() for group, c in zip(clipping.groups, found, strict=True)}

    def clipped(
        self,
        clipping: ClippingFunction = "local",
        max_grad_norm: float = 1.0,
        style: str | Sequence[Any] = "flat",
        gamma: float = GAMMA,
    ) -> Tensor:
        """K [B C, B C]: H diag(c) if the style is flat, else sum_r H_r diag(c_r) over the groups.

        The arguments are those of `fastdp.privatize`.
        """
        rule = self.clipping(clipping, max_grad_norm, style, gamma)
        outputs = self.size[1]
        total = torch.zeros_like(self.matrix)
        for group, c in zip(rule.groups, self.factors(rule).values(), strict=True):
            total += self._sum(group.parameters) * c.repeat_interleave(outputs)  # by column
        return total

    def batch_clipped(self, max_grad_norm: float) -> Tensor:
        """min(1, R / ||sum_i dl_i/dw||) H: the sum is clipped as a whole, which is not private training."""
        g = self.gradients.flatten()
        norm = math.sqrt(max(float(g @ self.matrix @ g), 0.0))
        return self.matrix * min(1.0, max_grad_norm / norm if norm else 1.0)

    def derivative(self, kernel: Tensor, reduction: str = "mean") -> float:
        """Compute dL/dt of gradient flow under the kernel K [B C, B C], per unit of learning rate.

        Args:
            kernel: K [B C, B C].
            reduction: "sum" gives -g^T K g, for the sum of the losses under the clipped sum. "mean" divides by B^2, for
                the mean loss under the clipped sum over B, as optimizers divide it if expected_batch_size is B.

        Raises:
            ValueError: if the reduction is unknown.
        """
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be mean or sum, not {reduction!r}")
        g = self.gradients.flatten()
        return -float(g @ kernel @ g) / (self.size[0] ** 2 if reduction == "mean" else 1)

    def _norm_sq(self, clipping: Clipping) -> list[Tensor]:
        b, c = self.size
        found = []
        for group in clipping.groups:
            blocks = self._sum(group.parameters).view(b, c, b, c).diagonal(dim1=0, dim2=2)  # [C, C, B]
            found.append(torch.einsum("bc,cdb,bd->b", self.gradients, blocks, self.gradients).clamp(min=0))
        return found

    def _sum(self, names: Iterable[str]) -> Tensor:
        return torch.stack([self.kernels[name] for name in names]).sum(0)


def ntk(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loss: Loss,
    *,
    params: Iterable[Tensor] | None = None,
    memory_limit: int = 2 * 2**30,
) -> NTK:
    """Compute the empirical NTK of a model on one batch.

    Args:
        model: inputs -> [B, C] or [B]. A copy in float64 is used. No fastdp optimizer may be attached to it.
        inputs: the model's only argument. Tensors of floats are cast to float64, as are such targets.
        targets: passed on to the loss.
        loss: (outputs as the model returns them, targets) -> the samples' losses [B], each computed from its own
            outputs alone.
        params: the trained parameters (default: all that require grad).
        memory_limit: the bytes that the Jacobian and the kernels may take.

    Raises:
        ValueError: if a shape is wrong, the outputs change from one forward to the next (dropout), or the memory is not
            enough.
        SampleMixingError: if the model or the loss couples samples.
    """
    chosen = None if params is None else {id(p) for p in params}
    named: dict[str, Tensor] = {
        n: p for n, p in model.named_parameters() if (p.requires_grad if chosen is None else id(p) in chosen)
    }
    if not named or (chosen is not None and len(named) != len(chosen)):
        raise ValueError("params must be parameters of the model, at least one (none given: one must require grad)")
    inputs, targets = _double(inputs), _double(targets)
    with torch.no_grad():
        shape = copy.deepcopy(model).double()(inputs)
    if not isinstance(shape, Tensor) or shape.dim() not in (1, 2) or not shape.numel():
        what = tuple(shape.shape) if isinstance(shape, Tensor) else type(shape).__name__
        raise ValueError(f"the model must return outputs [B, C] or [B], not {what}: wrap it in a module that does")
    flat, rows = shape.dim() == 1, shape.numel()
    count = sum(p.numel() for p in named.values())
    needed = 8 * rows * (2 * count + (len(named) + 4) * rows)
    if needed > memory_limit:
        raise ValueError(
            f"the Jacobian of {rows} outputs (samples x classes) by {count} parameters and its kernels need "
            f"{needed / 2**30:.3g} GiB, of {memory_limit / 2**30:.3g}: take fewer samples, fewer parameters (params=), "
            "or raise memory_limit"
        )
    outputs = shape.view(len(shape), -1).clone().requires_grad_()
    losses, gradients = _output_gradients(outputs, targets, loss, flat)
    jacobian = _jacobian(model, named, inputs, outputs.detach(), flat)
    return NTK(named, jacobian, outputs.detach(), losses, gradients)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _output_gradients(outputs: Tensor, targets: Any, loss: Loss, flat: bool) -> tuple[Tensor, Tensor]:
    """Losses [B] and g [B, C]; each loss must be computed from its own outputs alone."""
    each = loss(outputs[:, 0] if flat else outputs, targets)
    b = len(outputs)
    if not isinstance(each, Tensor) or each.shape != (b,):
        what = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
        raise ValueError(f"the loss must return the losses of the {b} samples, [{b}] (reduction='none'), not {what}")
    if not bool(torch.isfinite(outputs).all()):
        raise ValueError("the model's outputs are not all finite (as its inputs are not, perhaps)")
    gradients = torch.zeros_like(outputs)
    for i in range(b):
        found = torch.autograd.grad(each[i], outputs, retain_graph=True, allow_unused=True)[0]
        if found is None:
            continue
        gradients[i] = found[i]
        found[i] = 0
        if bool((found != 0).any()):
            raise SampleMixingError(f"the loss of sample {i} depends on the outputs of others: it has no own gradient")
    return each.detach(), gradients.detach()


def _jacobian(
    model: nn.Module, named: dict[str, Tensor], inputs: Any, outputs: Tensor, flat: bool
) -> dict[str, Tensor]:
    """{parameter: df/dw [B C, P]}: a backward of sum_b f_(b,c) for each output c gives its rows for all samples."""
    twin = copy.deepcopy(model).double()
    copies = dict(twin.named_parameters())
    for name, parameter in copies.items():
        parameter.requires_grad_(name in named)
    engine = PerSampleGradients(twin, [copies[name] for name in named], loss_reduction="sum")
    b, c = outputs.shape
    jacobian = {name: outputs.new_zeros(b, c, p.numel()) for name, p in named.items()}
    try:
        for column in range(c):
            with torch.enable_grad():
                now = twin(inputs).view(b, -1)
                if not torch.allclose(now.detach(), outputs, rtol=1e-9, atol=1e-12):
                    raise ValueError("the outputs change from one forward to the next (dropout?): call model.eval()")
                now[:, column].sum().backward()
            for name, rows in engine.materialize().items():
                jacobian[name][:, column] = rows.reshape(b, -1)
    finally:
        engine.detach()
    return {name: part.view(b * c, -1) for name, part in jacobian.items()}

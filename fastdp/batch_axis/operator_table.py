"""The table of torch functions by kind (views, in-place, random, ...) that all rules read.

A name stands for every spelling of the function (`torch.f`, `Tensor.f`, `F.f`). What only a function's own rule can
know (that it picks rows, or joins them) stands at the rule (`fastdp.batch_axis.calls`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F


def function_name(func: Any) -> str:
    """A readable name of a torch function: F.linear is 'linear', a property getter is its property."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return str(name)


def spellings(*names: str) -> list[Any]:
    """Every spelling of the functions: torch.f, Tensor.f, F.f."""
    found = [getattr(place, name, None) for name in names for place in (torch, torch.Tensor, F)]
    return [function for function in found if function is not None]


def _forms(names: str, *forms: str) -> frozenset[str]:
    return frozenset(form.format(name) for name in names.split() for form in forms)


def _names(names: str, *kinds: Iterable[str]) -> frozenset[str]:
    return frozenset(names.split()).union(*kinds)


# --------------------------------------------------------------------------- arithmetic

_IN_PLACE_DUNDERS = _forms("add sub mul truediv floordiv mod pow and or xor matmul", "__i{}__") | {"__setitem__"}
COMPUTING = _forms(
    "add sub mul div truediv pow multiply subtract divide true_divide floordiv rsub",
    "{}", "{}_", "__{}__", "__r{}__", "__i{}__",
)  # fmt: skip
ADDING = _names("add sub subtract rsub add_ sub_", _forms("add sub", "__{}__", "__r{}__", "__i{}__"))
SCALING = _names(
    "mul multiply div divide true_divide mul_ div_ __mul__ __rmul__ __truediv__ __imul__ __itruediv__"
)  # and not the number divided by a tensor
SUBTRACTING = _names("sub subtract __sub__")
ELEMENTWISE = _names(
    "add sub mul div pow neg abs exp log sqrt rsqrt reciprocal square sin cos tanh sigmoid erf relu relu6 "
    "gelu silu mish elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid logsigmoid "
    "tanhshrink dropout clamp clip clamp_min clamp_max masked_fill maximum minimum eq ne lt le gt "
    "ge logical_and logical_or logical_not isnan isinf floor ceil round sign subtract multiply divide "
    "true_divide rsub add_ sub_ mul_ div_ relu_ tanh_ sigmoid_ exp_ masked_fill_ clamp_ __add__ __radd__ "
    "__sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __iadd__ "
    "__isub__ __imul__ __itruediv__ __and__ __or__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
    "float half bfloat16 double bool long int copy_ __floordiv__ __rfloordiv__ floor_divide __mod__ remainder fmod "
    "bitwise_and bitwise_or bitwise_xor bitwise_not logical_xor __xor__ __lshift__ __rshift__ isfinite trunc frac "
    "expm1 log1p log2 log10 exp2 sinh cosh atan atan2 nan_to_num square_ sqrt_ neg_ abs_ clamp_min_ clamp_max_ pow_ "
    "floor_ round_ remainder_ lerp addcmul addcdiv lerp_ addcmul_ addcdiv_ positive erfc hypot hardshrink softshrink "
    "rrelu rrelu_ poisson binomial normal geometric_ _standard_gamma"  # these draw for each element
)


def is_in_place(name: str) -> bool:
    """Whether the function writes to its first argument."""
    name = name.partition(".")[0]  # torch.ops.aten.add_.Tensor
    return name in _IN_PLACE_DUNDERS or (name.endswith("_") and not name.endswith("__"))


# --------------------------------------------------------------------------- the same numbers in another form

CASTING = _names("to float double half bfloat16 type clone contiguous")
VIEWS = _names(
    "permute transpose t T mT movedim moveaxis swapaxes swapdims squeeze unsqueeze unbind narrow select chunk split "
    "tensor_split __iter__"
)  # whose sizes are given by place, never by number
# only move, drop or cast elements
MOVING = _names(
    "view reshape flatten unflatten split_with_sizes H mH neg __getitem__ view_as reshape_as requires_grad_ diagonal",
    VIEWS - {"__iter__"},
    CASTING,
)
MOVING_IN_PLACE = _names("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_")
KEEPING_SCORES = _names("transpose permute view reshape flatten contiguous clone unsqueeze squeeze swapaxes mT")
BROADCASTING = _names("expand expand_as broadcast_to")
COPYING = _names("repeat tile repeat_interleave")  # broadcasts, where they repeat what is there once
CONVERTING = _names(
    "to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_dense to_mkldnn coalesce dequantize detach clone"
)
# linear, and with one tensor of data: what they do to the numbers, they do to every sample's
LINEAR = _names(
    "neg_ __neg__ positive sum mean squeeze_ unsqueeze_ type_as cpu cuda detach data index_select flip retain_grad "
    "alias repeat cumsum",
    MOVING - {"moveaxis", "swapdims", "tensor_split", "split_with_sizes", "H", "mH"}, BROADCASTING,
)  # fmt: skip
KEEPING_COUNTS = _names("float double half bfloat16 to long int clamp clamp_min clip clamp_ clamp_min_ detach")
TAKING_A_TYPE = _names("to type_as")  # of a tensor beside the first
TAKING_A_PATTERN = TAKING_A_TYPE | _names("expand_as view_as reshape_as new_tensor")  # or its shape, or device

# --------------------------------------------------------------------------- rows

# parts of rows: cut of a parameter or buffer, they are constants that go by place (`batch_positions.note_made`)
CUTTING = _names(
    "__getitem__ narrow select split chunk split_with_sizes tensor_split hsplit vsplit dsplit unbind index_select"
)
CUTTING_A_TABLE = _names(
    "as_strided narrow_copy pad resize_ slice_copy split_copy split_with_sizes_copy topk unsafe_chunk unsafe_split "
    "unsafe_split_with_sizes",
    CUTTING,
)
TAKING_ROWS = (CUTTING - {"split_with_sizes"}) | _names("flip roll __iter__")
PICKING_ROWS = _names("__getitem__ index_select")
LOOKING_UP = _names("take take_along_dim embedding gather", PICKING_ROWS)
STACKING = _names("stack cat concat concatenate hstack vstack")
CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
COMMUTING = _names(
    "add add_ __add__ __radd__ __iadd__ mul mul_ multiply __mul__ __rmul__ __imul__ maximum minimum eq ne __eq__ "
    "__ne__ logical_and logical_or logical_xor __and__ __or__ __xor__"
)
COMPARING_PARTS = _names("stack cat concat concatenate")  # their rules look at what was done to the parts of a batch
WRITING_ROWS = _forms("scatter scatter_add scatter_reduce index_add index_put index_copy index_fill", "{}", "{}_")
SIZED_BY_DATA = _names(
    "nonzero argwhere masked_select unique unique_consecutive unique_dim bincount one_hot repeat_interleave"
)
EXTREMES = _names("max min amax amin")
BY_LENGTHS = _names("lstm gru rnn_tanh rnn_relu _pad_packed_sequence _pack_padded_sequence")

# --------------------------------------------------------------------------- new tensors

LIKE = _names("zeros_like ones_like full_like empty_like rand_like randn_like")  # constants: no values in
SHAPED = _names("new new_zeros new_ones new_empty new_full", LIKE)
FILLING = _names("zeros ones full empty new new_zeros new_ones new_full zeros_like ones_like full_like")
NUMBERING = _names(
    "arange linspace logspace eye tril_indices triu_indices range cartesian_prod vander hann_window hamming_window "
    "bartlett_window blackman_window kaiser_window"
)
OF_NUMBERS = _names("tensor as_tensor asarray")  # of Python's or numpy's
DRAWING = _names(
    "rand randn randint rand_like randn_like randint_like randperm normal bernoulli multinomial poisson bernoulli_ "
    "normal_ uniform_ exponential_ random_ cauchy_ log_normal_ geometric_ dropout alpha_dropout trunc_normal_"
)
SIZED = _names("arange zeros ones empty eye rand randn randperm tril_indices triu_indices")
OF_A_NUMBER = _names("tensor as_tensor asarray scalar_tensor full full_like new_tensor new_full")

# functions (no names: a user's may have the same) that draw random numbers, or whose rules have checked them
UNCHECKED = frozenset(
    spellings(
        *"dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout dropout_ bernoulli multinomial "
        "rand_like randn_like empty_like randint_like _sample_dirichlet bernoulli_ normal_ uniform_ exponential_ "
        "random_ cauchy_ log_normal_ where".split(),
        *ELEMENTWISE,
    )
)

# that move numbers and read none: whether they couple samples follows from shapes (functions, no names, as above)
REARRANGING = frozenset(
    spellings(
        *"pad cat concat concatenate stack hstack vstack dstack column_stack roll flip fliplr flipud rot90 repeat tile "
        "clone contiguous".split()
    )
)

# views of whole rows, wherever these lie (functions, no names, as above)
MOVING_DIMS = frozenset(spellings(*"permute transpose t movedim moveaxis swapaxes swapdims squeeze unsqueeze".split()))

# --------------------------------------------------------------------------- what is told of a tensor, or done to it

ASKING = _names(
    "__len__ size dim numel nelement stride is_contiguous element_size data_ptr ndimension storage_offset "
    "is_floating_point is_complex get_device"
)
ASKING_PROPERTIES = _names("shape dtype device ndim requires_grad is_leaf layout is_cuda is_nested names itemsize")
T = torch.Tensor
TELLING_SIZES = frozenset((T.__len__, T.size, T.numel, T.nelement, T.shape.__get__))  # type: ignore[attr-defined]
GIVING_NUMBERS: frozenset[Any] = frozenset((T.numpy, T.__array__, T.tolist, T.item, T.__float__, T.__complex__))
GIVING_MEMORY: frozenset[Any] = frozenset((T.numpy, T.__array__, T.__dlpack__, T.untyped_storage, T.storage))
REACHING_GRAPH: frozenset[Any] = frozenset((T.register_hook, T.grad_fn.__get__, T._backward_hooks.__set__))  # type: ignore
READING: frozenset[Any] = frozenset((
    T.numpy, T.tolist, T.item, T.__float__, T.__int__, T.__bool__, T.__index__, T.__format__, torch.is_nonzero,
))  # fmt: skip
COMPARING = frozenset((torch.equal, T.equal, torch.allclose, T.allclose))
OF_PYTHONS_NUMBERS: frozenset[Any] = frozenset((torch.tensor, torch.as_tensor, torch.asarray, T.new_tensor))
# they write rows that are larger than a largest norm, each by itself
RENORMING: frozenset[Any] = frozenset((F.embedding, F.embedding_bag, torch.embedding_bag))
SHARING_MEMORY = _names("numpy __array__ __dlpack__ storage untyped_storage _typed_storage")
BASE: Any = T._base.__get__  # type: ignore[union-attr]
CHANGING_MEMORY = _names("set_ swap_ resize_ resize_as_")
# that show a tensor with its dimensions in another order, or more or fewer of size 1
RESHAPING = _names("permute transpose t T mT movedim moveaxis swapaxes swapdims squeeze unsqueeze")
HOOKING = _names("register_hook register_post_accumulate_grad_hook")

# --------------------------------------------------------------------------- of a batch's labels

RESHAPING_LABELS = _names(
    "view reshape squeeze unsqueeze flatten one_hot to long float double contiguous clone cpu cuda permute transpose t "
    "T mT movedim moveaxis swapaxes swapdims normalize"
)
COMBINING_LABELS = _names(
    "bincount unique unique_consecutive histc histogram sum nansum mean nanmean std var std_mean var_mean amax amin "
    "aminmax max min prod median nanmedian mode quantile nanquantile kthvalue count_nonzero any all argmax argmin "
    "argsort sort msort topk cumsum cumprod cummax cummin logcumsumexp diff norm linalg_norm linalg_vector_norm dist "
    "cov logsumexp softmax softmin log_softmax"
)
MULTIPLIED_BY_LABELS = _names("matmul mm mv dot vecdot __matmul__ __rmatmul__")  # whose rows the second one contracts
PAIRED_WITH_LABELS = _names("linear bilinear cdist bmm inner outer ger pairwise_distance cosine_similarity kron")
INDEXED_BY_LABELS = _names("cat concat stack hstack take", WRITING_ROWS)

"""Per-sample gradients in `p.grad_sample`, by fastdp's engine."""

from opacus.grad_sample import AbstractGradSampleHooks, AbstractGradSampleModule

from .grad_sample_module import (
    GradSampleHooks,
    GradSampleHooksNoOp,
    GradSampleModule,
    GradSampleModuleExpandedWeights,
    GradSampleModuleNoOp,
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from .grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
    GradSampleHooksFastGradientClippingTP,
    GradSampleModuleFastGradientClipping,
    GradSampleModuleFastGradientClippingTP,
)
from .grad_sample_module_fast_gradient_clipping_fsdp import (
    GradSampleHooksFastGradientClippingFSDP,
    GradSampleModuleFastGradientClippingFSDP,
)
from .utils import (
    get_gsm_class,
    get_hooks_class,
    prepare_module,
    register_grad_sampler,
    register_norm_sampler,
    wrap_model,
)

__all__ = [
    "AbstractGradSampleHooks",
    "AbstractGradSampleModule",
    "GradSampleHooks",
    "GradSampleHooksFastGradientClipping",
    "GradSampleHooksFastGradientClippingFSDP",
    "GradSampleHooksFastGradientClippingTP",
    "GradSampleHooksNoOp",
    "GradSampleModule",
    "GradSampleModuleExpandedWeights",
    "GradSampleModuleFastGradientClipping",
    "GradSampleModuleFastGradientClippingFSDP",
    "GradSampleModuleFastGradientClippingTP",
    "GradSampleModuleNoOp",
    "create_or_accumulate_grad_sample",
    "get_gsm_class",
    "get_hooks_class",
    "prepare_module",
    "promote_current_grad_sample",
    "register_grad_sampler",
    "register_norm_sampler",
    "wrap_model",
]

"""Which of Opacus's own tests are not run, and which rightly fail on fastdp.compat.opacus, with the reason of each."""

NOT_RUN = {
    "ddp_hook_check.py": "a helper of multi-GPU tests, no test",
    "multigpu_fsdpcheck.py": "several GPUs: data-parallel and sharded training are not supported",
}

PRIVATE = "looks at private attributes of Opacus's hooks: "
NO_GRAD = "wants autograd's .grad, the sum of unclipped gradients, after a backward: fastdp does not compute it"

# pattern over 'file::Class::test' -> the reason
EXPLAINED: dict[str, str] = {
    r"DPTensorArithmeticTest::": "wants a wrapper of per-sample losses: the loss of mode ghost is a plain tensor here",
    r"HooksFastGradientClippingTest::test_(grad_sample|norm_sample)_computation": PRIVATE + "p._norm_sample",
    r"HooksFastGradientClippingTest::test_cleanup": PRIVATE + "p._forward_counter",
    r"::test_standard_module_validation": PRIVATE + "module.ft_compute_sample_grad",
    r"GradSampleModuleFastGradientClippingTest::test_norm_calculation": PRIVATE + "p._norm_sample",
    r"ClippingEmbeddingLayerTest::test_norm_calculation": PRIVATE
    + "p._norm_sample, after two backwards of one forward",
    r"ClippingEmbeddingLayerTest::test_gradient_calculation": (
        "pins a fault: the clipped mean is compared with the clipped sum, which in Opacus agree as factors [3] meet "
        "losses [3, 1]: three times the gradient"
    ),
    r"BatchMemoryManagerTest\w*::test_(basic|equivalent)": (
        "subtracts outputs [B, 1] from targets [B], which makes a loss [B, B] of all pairs: refused by name"
    ),
    r"EmptyFirstBatchTest::test_empty_first_batch_with_dp_dataloader": (
        "wants a warning of an empty first batch, which is a list there: here it has the structure of the records"
    ),
    r"Embedding_bag_test::test_input_across_dims": (
        "a limit of fastdp: in flat ids with offsets, given to the model itself, whose each id is must be told by "
        "fastdp.mark_rows; it is refused by name"
    ),
    r"::test_grad_sample_accumulation": NO_GRAD,
    r"Conv2d_test::test_asymetric_dilation_and_kernel_size": NO_GRAD,
    r"RNN_test::test_rnn": (
        "pins a fault: of unsorted packed sequences Opacus gives the layer's rows in the order of their lengths (those "
        "of a head behind it in the batch's, so that the two mix samples), and the test sorts its truth to match; here "
        "row i is sample i in every layer"
    ),
    r"PrivacyEngineValidationTest::test_(custom_linear|unsupported|extra_param)_hooks": PRIVATE
    + "module.ft_compute_sample_grad",
    r"PrivacyEngineValidationTest::test_(unsupported|extra_param)_ew": (
        "wants an error for a layer that Opacus's mode ew cannot take: it is exact here"
    ),
    r"PrivacyEngineText\w*::test_make_private_with_epsilon": (
        "pins a fault: it says batch_first of a model whose batch is second, so samples are words; refused by name"
    ),
}

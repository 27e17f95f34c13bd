"""Which of Opacus's own tests are not run, and which rightly fail on fastdp.compat.opacus, with the reason of each."""

NOT_RUN = {
    "ddp_hook_check.py": "a helper of multi-GPU tests, no test",
    "multigpu_fsdpcheck.py": "several GPUs: data-parallel and sharded training are not supported",
}

# pattern over 'file::Class::test' -> the reason
EXPLAINED: dict[str, str] = {}

"""Devices that a user names, checked before anything is loaded."""

import torch

from fusion_bench_featcal.errors.block import first_line


def check_cuda(name: str, setting: str) -> None:
    """Refuse a GPU where torch has none. CUDA is not initialised, as processes may be forked.

    Args:
        name: A device, such as `cpu`, `cuda:1` or Fabric's `gpu`.
        setting: The setting with its value, for the message.

    Raises:
        ValueError: If torch cannot use it, with the way out.
    """
    if name.partition(":")[0] not in ("cuda", "gpu") or torch.cuda.is_available():
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"{setting}: this torch ({torch.__version__}) has no CUDA. Leave it out, or install a "
            "torch with CUDA (https://pytorch.org)"
        )
    raise ValueError(
        f"{setting}: torch finds no GPU. Leave it out, or check the driver (nvidia-smi)"
    )


def check_device(name: str, setting: str) -> None:
    """Refuse a device that torch cannot use. Arguments and errors are those of `check_cuda`."""
    check_cuda(name, setting)
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # a build without the device asserts
        raise ValueError(f"{setting} cannot be used: {first_line(error)}") from error

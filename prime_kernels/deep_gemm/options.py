# SPDX-License-Identifier: Apache-2.0
"""What DeepGEMM keeps per process: the alignment of groups, and how many SMs a call may use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from prime_kernels.errors import UnsupportedConfig

BLOCK = 64  # rows; groups start at multiples of it in every kernel (kBlock of kernels_src/moe/group_bounds.cuh)
_DEFAULT_ALIGNMENT = 128  # what callers of DeepGEMM on Hopper pad to


@dataclass
class _Options:
    alignment: int = _DEFAULT_ALIGNMENT
    num_sms: int = 0  # 0: all


_options = _Options()


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows that callers pad groups to: 128 unless set. Raises nothing."""
    return _options.alignment


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Set the alignment that `get_mk_alignment_for_contiguous_layout` reports.

    Only calls with `use_psum_layout=True` read it, to find where groups start; the others take any multiple of 64.

    Args:
        new_value: Rows, a multiple of 64.

    Raises:
        UnsupportedConfig: It is none (E41).
    """
    if not isinstance(new_value, int) or isinstance(new_value, bool) or new_value < BLOCK or new_value % BLOCK:
        raise UnsupportedConfig(
            f"new_value is {new_value!r}; need a positive multiple of {BLOCK}.",
            facts={"argument": "new_value", "got": repr(new_value), "multiple_of": BLOCK},
            remedy=f"Use {_DEFAULT_ALIGNMENT}, or {BLOCK} to pad less.",
        )
    _options.alignment = new_value


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None, num_groups: int | None = None
) -> int:
    """The smallest alignment that the kernels take, 64, whatever the arguments. Raises nothing."""
    return BLOCK


def set_num_sms(new_num_sms: int) -> None:
    """Use at most so many SMs in later calls; kernels run in pairs of CTAs, so an odd number leaves one SM free.

    Args:
        new_num_sms: 2 or more, or 0 for all of the device.

    Raises:
        UnsupportedConfig: Neither (E41).
    """
    good = isinstance(new_num_sms, int) and not isinstance(new_num_sms, bool)
    if not good or not (new_num_sms == 0 or new_num_sms >= 2):
        raise UnsupportedConfig(
            f"new_num_sms is {new_num_sms!r}; need 0 (all of them), or 2 and more.",
            facts={"argument": "new_num_sms", "got": repr(new_num_sms)},
            remedy="Leave at least two SMs to the call.",
        )
    _options.num_sms = new_num_sms


def get_num_sms() -> int:
    """SMs that a call on the current device may use. Raises what torch does when there is no device."""
    import torch

    return usable_sms(torch.cuda.current_device())


def usable_sms(device: int) -> int:
    """SMs that a call on a device may use."""
    present = _present_sms(device)
    return min(_options.num_sms or present, present)


@cache
def _present_sms(device: int) -> int:
    import torch

    present: int = torch.cuda.get_device_properties(device).multi_processor_count
    return present

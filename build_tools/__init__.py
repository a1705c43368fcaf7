# SPDX-License-Identifier: Apache-2.0
"""Tools that build, pack and inspect; never shipped."""

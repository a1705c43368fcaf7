# SPDX-License-Identifier: Apache-2.0
"""Measurements of the layer against other implementations; never shipped."""

# SPDX-License-Identifier: Apache-2.0
"""Which anatomy the kernels should have: candidate grouped GEMMs on the layer's tile types, on one GPU."""

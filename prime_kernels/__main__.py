# SPDX-License-Identifier: Apache-2.0
"""`python -m prime_kernels` is the console script `prime-kernels`."""

import sys

from prime_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())

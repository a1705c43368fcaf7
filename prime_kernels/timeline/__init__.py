# SPDX-License-Identifier: Apache-2.0
"""`prime-kernels trace`: what every SM did during one call, from records that the kernels' profile build writes.

`capture` runs a call on a GPU; everything else works on its records on any machine: `records` reads them, `states` says
what an SM did at every moment, `floor` what the call could not be faster than, `summary` where the rest of its time
went, `perfetto` and `picture` show it.
"""

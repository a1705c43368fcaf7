# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of an expert-parallel group can all reach. Importing this imports no torch.

arena.py      how a rank's arena is laid out, in numbers
base.py       what every provider of arenas gives
loopback.py   virtual ranks of one process on one GPU
symmetric.py  ranks of a process group, through torch's symmetric memory
"""

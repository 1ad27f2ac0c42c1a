"""The race detector: which launches touch the same bytes without an order between them.

- `access`: what a kernel touches, and whether two of them share a byte.
- `clocks`: what is known to have happened before what (vector clocks), and the memory of past accesses.
- `detector`: feeds both from the runtime's log, through captures and replays.
- `report`: a race as people read it.

Order is decided by launches, records, waits and synchronisations, not by when work happens to run: a program's races are
found under any schedule, `fifo` included.
"""

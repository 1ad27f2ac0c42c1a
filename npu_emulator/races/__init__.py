"""The race detector: finds launches that touch the same bytes without an order between them.

- `access`: the bytes that a kernel touches, and whether two accesses share a byte.
- `clocks`: the happens-before order (vector clocks), and past accesses.
- `detector`: feeds both from the runtime's log, through captures and replays.
- `report`: a race as text.

Launches, records, waits and synchronisations decide the order, not the time of execution. So the detector finds a program's
races under any schedule, also `fifo`.
"""

"""Facts of a graph: what its nodes do to memory, in what order they run, and from which line of the user's code they come.

Every package above takes its facts from here and computes none itself. Nothing here touches a device.

| module | answers |
|---|---|
| `operators` | what one node reads, writes and views, by its operator's schema; `undeclared` adds what schemas leave out |
| `memory.aliases` | which bytes each node of a graph lies in, which it reads and which it writes |
| `memory.regions`, `memory.strides` | whether two pieces of memory have a byte in common |
| `memory.memory_map`, `memory.history` | the reads and writes of one memory in their order |
| `metadata`, `snapshot` | dtype, shape and strides of each value; what changed since a moment |
| `effects`, `launches`, `noops` | which nodes do more than produce a result, start work, or do nothing |
| `collectives`, `inplace`, `positional_arguments`, `repeated_parts` | facts of single operators |
| `source` | the line of the user's code |
| `streams` | the one representation of streams: labels, events, and the order that they prove |
"""

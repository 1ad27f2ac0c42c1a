"""Random programs: typed steps over named values, around a planted pattern or of integers alone.

Read `program` first: a program is data, and renders to plain Python. `strategies` draws one. `choices` is where random choices
come from, `builder` grows values, `inputs` makes tensors. `patterns`, `planted` and `planting` put a rule's pattern into a program;
`near_misses`, `argument_misses` and `order_misses` spoil it, `variations` change what must not matter.
"""

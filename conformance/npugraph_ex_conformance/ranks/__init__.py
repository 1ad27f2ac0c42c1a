"""Programs over several ranks: random ones, and decoders whose layers or experts are spread over two emulated devices.

`processes` starts the ranks and asks them; `programs` draws programs and says what arithmetic gives; `checks` is what a rank does.
"""

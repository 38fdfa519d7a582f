"""The language server: what an editor shows of a recipe while it is written.

`server.py` and `features.py` speak the protocol, by pygls. What takes time (checking, explaining) is
`analysis.py`'s, in a process of its own (`process.py`), so that the server always answers. What has to work
on text that is no YAML yet (completion, outline) rests on `scan.py`, which reads by indentation and never
fails.
"""

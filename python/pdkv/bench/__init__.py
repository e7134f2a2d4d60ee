"""`pdkv bench`: moves a real KV cache between two processes, checks every byte, and says how fast that was.

The modules are a straight line: `sizes`, `presets`, `tables`, `pattern` and `cases` decide what is moved
and know no engine; `buffers`, `control`, `side`, `producer` and `limits` move it; `measure` runs one case,
`latency` and `floors` run fixed suites; `report` and `plot` show rows; `cli` parses. Importing this
package imports none of them.
"""

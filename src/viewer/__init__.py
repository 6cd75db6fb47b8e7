"""The trace viewer behind ``pagespec trace view``: a step trace as one HTML page, or for Perfetto.

Read in this order: ``timeline`` (the events of a trace as columns: steps, lanes, segments),
``page`` (the columns and the page's parts in one file), ``perfetto`` (the same as Chrome trace
JSON); then the page itself, plain JavaScript drawn on a canvas: ``trace_data.js``, ``view.js``,
``lanes.js``, ``tracks.js``, ``inspect.js``, ``main.js``. ``palette.css`` is the server's live
page's as well. It reads traces as the specification does; the command line imports it.
"""

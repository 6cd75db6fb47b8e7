"""Reference pages of the documentation, made from the declarations in the code.

``python -m tests.support.reference_docs`` writes the generated parts of pages; ``--check`` lists
pages that are not current. A generated part is between ``<!-- NAME -->`` and ``<!-- end -->``;
the rest of a page is written by hand. Read ``pages`` first: it has the table of pages.
"""

--------------------------------- MODULE MC ---------------------------------
(* Values that a .cfg file cannot spell.                                                          *)
EXTENDS PageSpec
Pair == [prompt |-> <<0, 0>>, limit |-> 4]
Long == [prompt |-> <<0, 1, 0>>, limit |-> 5]
Both == {Pair, Long}
=============================================================================

------------------------------ MODULE PageSpec ------------------------------
(* The block pool and the scheduler (first come first served), as spec/*.py says them.           *)
(* Written by hand beside the Python text, not generated from it. Requests are numbered by       *)
(* arrival, so that their number is their rank. A key is the exact sequence of tokens up to the   *)
(* end of a block; block contents, the oracle of S6 and S16, are left to the Python text.         *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
  NumRequests,   \* how many may arrive
  NumBlocks, BlockSize, Budget, Cap,
  Depth,         \* steps that may be unsettled when the next is scheduled
  Templates,     \* a set of [prompt |-> sequence of tokens, limit |-> length at which it ends]
  Outputs,       \* tokens that may be sampled
  Stop,          \* the one of them that ends a request
  UserActions    \* whether Abort, Pause and Resume happen

VARIABLES
  req,           \* sequence of requests that arrived
  ref, key,      \* by block
  free, lru,     \* sequences: free is a stack with its top last, lru is oldest first
  flight         \* sequence of steps, each a sequence of rows; oldest first

vars == <<req, ref, key, free, lru, flight>>

Blocks == 0 .. NumBlocks - 1
NoKey  == <<>>
NoToken == 99
Min(a, b) == IF a < b THEN a ELSE b
CeilDiv(a, b) == (a + b - 1) \div b
Range(s) == {s[i] : i \in 1 .. Len(s)}
Last(s) == s[Len(s)]
Front(s) == SubSeq(s, 1, Len(s) - 1)
RECURSIVE SumOver(_, _)
SumOver(f, S) == IF S = {} THEN 0 ELSE LET x == CHOOSE x \in S : TRUE
                                       IN f[x] + SumOver(f, S \ {x})

InFlight(q) == q.dispatched - q.computed
Own(rs, b) == SumOver([r \in 1 .. Len(rs) |->
                Cardinality({i \in 1 .. Len(rs[r].table) : rs[r].table[i] = b})], 1 .. Len(rs))
Ids(rs, status) == {r \in 1 .. Len(rs) : rs[r].status = status}

-----------------------------------------------------------------------------
(* The pool. A working state w is a record of req, ref, key, free, lru and, while a plan is made, *)
(* budget, rows, closed, open, preempted, held.                                                   *)

Available(w) == Len(w.free) + Len(w.lru)

TakeBlock(w, r) ==                                  \* S5
  LET b == IF Len(w.free) > 0 THEN Last(w.free) ELSE Head(w.lru)
  IN [w EXCEPT !.free = IF Len(w.free) > 0 THEN Front(@) ELSE @,
               !.lru  = IF Len(w.free) > 0 THEN @ ELSE Tail(@),
               !.key[b] = NoKey,
               !.ref[b] = @ + 1,
               !.req[r].table = Append(@, b)]

RECURSIVE Allocate(_, _, _)
Allocate(w, r, n) == IF n = 0 THEN w ELSE Allocate(TakeBlock(w, r), r, n - 1)

KeyOf(q, i) == SubSeq(q.tokens, 1, i * BlockSize)   \* block i counts from 1
Holders(w, k) == {b \in Blocks : w.key[b] = k}

RECURSIVE HitsFrom(_, _, _)
HitsFrom(w, q, i) ==
  IF i > (Len(q.tokens) - 1) \div BlockSize \/ Holders(w, KeyOf(q, i)) = {} THEN <<>>
  ELSE <<CHOOSE b \in Holders(w, KeyOf(q, i)) : TRUE>> \o HitsFrom(w, q, i + 1)
LookUp(w, r) == HitsFrom(w, w.req[r], 1)            \* S11

Acquire(w, r, hits) ==                              \* S12: one act with the look-up
  [w EXCEPT !.ref = [b \in Blocks |-> IF b \in Range(hits) THEN @[b] + 1 ELSE @[b]],
            !.lru = LET keep(b) == b \notin Range(hits) IN SelectSeq(@, keep),
            !.req[r].table = hits,
            !.req[r].computed = Len(hits) * BlockSize,
            !.req[r].dispatched = Len(hits) * BlockSize,
            !.req[r].published = Len(hits),
            !.req[r].status = "running"]

DropReference(w, b) ==
  LET last == w.ref[b] = 1
  IN [w EXCEPT !.ref[b] = @ - 1,
               !.lru  = IF last /\ w.key[b] # NoKey THEN Append(@, b) ELSE @,
               !.free = IF last /\ w.key[b] = NoKey THEN Append(@, b) ELSE @]

RECURSIVE Release(_, _)
Release(w, r) ==                                    \* last block first
  IF w.req[r].table = <<>> THEN w
  ELSE Release([DropReference(w, Last(w.req[r].table)) EXCEPT !.req[r].table = Front(@)], r)

TakeBack(w, r) ==
  [Release(w, r) EXCEPT !.req[r].computed = 0, !.req[r].dispatched = 0, !.req[r].published = 0,
                        !.req[r].total = Len(w.req[r].tokens)]

RECURSIVE Publish(_, _)
Publish(w, r) ==
  LET q == w.req[r]
      i == q.published + 1
      k == KeyOf(q, i)
  IN IF i * BlockSize > q.computed THEN w
     ELSE Publish([w EXCEPT !.key = IF Holders(w, k) = {} THEN [@ EXCEPT ![q.table[i]] = k] ELSE @,
                            !.req[r].published = i], r)

-----------------------------------------------------------------------------
(* The plan: one walk in rank order.                                                              *)

Wanted(q) == IF q.total >= q.limit THEN 0 ELSE q.total - q.dispatched
Reserved(w, r) == Cardinality({y \in Ids(w.req, "running") : y > r /\ Wanted(w.req[y]) = 1})
WithinBudget(w, r, n) ==
  IF n = 1 /\ w.budget > 0 THEN 1
  ELSE IF w.budget > Reserved(w, r) THEN Min(n, w.budget - Reserved(w, r)) ELSE 0

Gained(w, chosen, hits) ==
  {b \in Blocks \ Range(hits) : w.ref[b] > 0 /\
     w.ref[b] = Cardinality({v \in chosen : b \in Range(w.req[v].table)})}
Younger(w, r) == {v \in Ids(w.req, "running") : v > r}
\* The fewest youngest whose release makes enough blocks available; {} if even all do not.
Victims(w, r, shortage, hits) ==
  LET enough(v) == Cardinality(Gained(w, {y \in Younger(w, r) : y >= v}, hits)) >= shortage
      cuts == {v \in Younger(w, r) : enough(v)}
  IN IF cuts = {} THEN {}
     ELSE LET cut == CHOOSE v \in cuts : \A y \in cuts : y <= v
              all == {y \in Younger(w, r) : y >= cut}
              gain == Gained(w, all, hits)
          IN {v \in all : Range(w.req[v].table) \cap gain # {}}           \* S21

RECURSIVE PreemptAll(_, _)
PreemptAll(w, vs) ==                                \* youngest first
  IF vs = {} THEN w
  ELSE LET v == CHOOSE v \in vs : \A y \in vs : y <= v
       IN PreemptAll([TakeBack(w, v) EXCEPT !.req[v].status = "waiting", !.preempted = @ \cup {v}],
                     vs \ {v})

\* [ok, w]: whether room was made, and the working state after.
MakeRoom(w, r, shortage, hits) ==
  LET vs == Victims(w, r, shortage, hits)
  IN IF vs = {} THEN [ok |-> FALSE, w |-> w]
     ELSE IF \E v \in vs : InFlight(w.req[v]) > 0
          THEN [ok |-> FALSE, w |-> [w EXCEPT !.held = @ \cup vs]]
          ELSE [ok |-> TRUE, w |-> PreemptAll(w, vs)]

AddRow(w, r, n) ==
  LET q == w.req[r]
      sampled == q.dispatched + n = q.total         \* S19
      x == Allocate(w, r, CeilDiv(q.dispatched + n, BlockSize) - Len(q.table))
  IN [x EXCEPT !.rows = Append(@, [r |-> r, n |-> n, sampled |-> sampled]),
               !.budget = @ - n,
               !.req[r].dispatched = @ + n,
               !.req[r].total = IF sampled THEN @ + 1 ELSE @]

Serve(w, r) ==
  LET q == w.req[r]
      wanted == WithinBudget(w, r, Wanted(q))
      slots == Len(q.table) * BlockSize - q.dispatched
      n == Min(wanted, slots + Available(w) * BlockSize)
      room == MakeRoom(w, r, 1, <<>>)
      m == IF room.ok THEN Min(wanted, Available(room.w) * BlockSize) ELSE 0
      closing(x, got) == IF got < wanted THEN [x EXCEPT !.closed = TRUE] ELSE x
  IN IF r \in w.held \/ wanted = 0 THEN w
     ELSE IF wanted <= slots THEN AddRow(w, r, wanted)
     ELSE IF w.closed THEN (IF slots > 0 THEN AddRow(w, r, slots) ELSE w)
     ELSE IF n > 0 THEN AddRow(closing(w, n), r, n)
     ELSE IF m > 0 THEN AddRow(closing(room.w, m), r, m)
     ELSE [room.w EXCEPT !.closed = TRUE]

Admit(w, r) ==
  LET q == w.req[r]
      may == /\ w.open /\ ~w.closed /\ w.preempted = {} /\ InFlight(q) = 0
             /\ Cardinality(Ids(w.req, "running")) < Cap
             /\ w.budget > Reserved(w, r)
      hits == LookUp(w, r)
      needed == CeilDiv(Len(q.tokens), BlockSize) - Len(hits)
      there == Available(w) - Cardinality(Range(hits) \cap Range(w.lru))
      room == MakeRoom(w, r, needed - there, hits)
  IN IF ~may THEN [w EXCEPT !.open = FALSE]
     ELSE IF needed <= there THEN Serve(Acquire(w, r, hits), r)
     ELSE IF room.ok THEN Serve(Acquire(room.w, r, hits), r)
     ELSE [room.w EXCEPT !.open = FALSE, !.closed = TRUE]

RECURSIVE Walk(_, _)
Walk(w, r) ==
  IF r > Len(w.req) THEN w
  ELSE Walk(IF w.req[r].status = "running" THEN Serve(w, r)
            ELSE IF w.req[r].status = "waiting" /\ r \notin w.preempted THEN Admit(w, r)
            ELSE w, r + 1)

Pool == [req |-> req, ref |-> ref, key |-> key, free |-> free, lru |-> lru]
Plan == Walk([req |-> req, ref |-> ref, key |-> key, free |-> free, lru |-> lru,
              budget |-> Budget, rows |-> <<>>, closed |-> FALSE, open |-> TRUE,
              preempted |-> {}, held |-> {}], 1)
Become(w) == /\ req' = w.req /\ ref' = w.ref /\ key' = w.key /\ free' = w.free /\ lru' = w.lru

-----------------------------------------------------------------------------
(* Actions.                                                                                       *)

Init == /\ req = <<>> /\ ref = [b \in Blocks |-> 0] /\ key = [b \in Blocks |-> NoKey]
        /\ free = [i \in 1 .. NumBlocks |-> NumBlocks - i] /\ lru = <<>> /\ flight = <<>>

Add == /\ Len(req) < NumRequests
       /\ \E t \in Templates :
            /\ CeilDiv(t.limit - 1, BlockSize) <= NumBlocks                \* S30
            /\ Len(t.prompt) < t.limit
            /\ req' = Append(req, [tokens |-> t.prompt, limit |-> t.limit, status |-> "waiting",
                 reason |-> "", computed |-> 0, dispatched |-> 0, total |-> Len(t.prompt),
                 table |-> <<>>, published |-> 0])
       /\ UNCHANGED <<ref, key, free, lru, flight>>

Schedule ==
  /\ Len(flight) <= Depth
  /\ LET w == Plan
     IN /\ w.rows # <<>>
        /\ Become(w)
        /\ \E tokens \in [{i \in 1 .. Len(w.rows) : w.rows[i].sampled} -> Outputs] :
             flight' = Append(flight, [i \in 1 .. Len(w.rows) |->
               [r |-> w.rows[i].r, n |-> w.rows[i].n,
                token |-> IF w.rows[i].sampled THEN tokens[i] ELSE NoToken]])

Finish(w, r, reason) ==
  LET x == [w EXCEPT !.req[r].status = "finished", !.req[r].reason = reason]
  IN IF InFlight(x.req[r]) = 0 THEN Release(x, r) ELSE x

SettleRow(w, row) ==
  LET r == row.r
      x == [w EXCEPT !.req[r].computed = @ + row.n]
      y == Publish([x EXCEPT !.req[r].tokens =
                      IF row.token = NoToken THEN @ ELSE Append(@, row.token)], r)
      drained == InFlight(x.req[r]) = 0
  IN IF w.req[r].status = "finished" THEN (IF drained THEN Release(x, r) ELSE x)   \* S24, S29
     ELSE IF row.token = Stop THEN Finish(y, r, "stop")
     ELSE IF row.token # NoToken /\ Len(y.req[r].tokens) >= y.req[r].limit
          THEN Finish(y, r, "length")
     ELSE IF y.req[r].status # "running" /\ drained THEN TakeBack(y, r) ELSE y

RECURSIVE SettleRows(_, _)
SettleRows(w, rows) == IF rows = <<>> THEN w
                       ELSE SettleRows(SettleRow(w, Head(rows)), Tail(rows))

Settle == /\ flight # <<>>
          /\ Become(SettleRows(Pool, Head(flight)))
          /\ flight' = Tail(flight)

Abort == \E r \in 1 .. Len(req) : /\ req[r].status # "finished"
                                  /\ Become(Finish(Pool, r, "abort"))
                                  /\ UNCHANGED flight
Pause == \E r \in 1 .. Len(req) :
           /\ req[r].status \in {"waiting", "running"}
           /\ LET w == [Pool EXCEPT !.req[r].status = "paused"]
              IN Become(IF InFlight(req[r]) = 0 THEN TakeBack(w, r) ELSE w)
           /\ UNCHANGED flight
Resume == \E r \in 1 .. Len(req) : /\ req[r].status = "paused"
                                   /\ req' = [req EXCEPT ![r].status = "waiting"]
                                   /\ UNCHANGED <<ref, key, free, lru, flight>>

Engine == Schedule \/ Settle
Next == Add \/ Engine \/ (UserActions /\ (Abort \/ Pause \/ Resume))
Spec == Init /\ [][Next]_vars /\ WF_vars(Engine)

-----------------------------------------------------------------------------
(* Properties.                                                                                    *)

Keyed == {b \in Blocks : key[b] # NoKey}
Unowned == {b \in Blocks : ref[b] = 0}
S1 == \A b \in Blocks : ref[b] = Own(req, b)
S2 == /\ Len(free) = Cardinality(Range(free)) /\ Len(lru) = Cardinality(Range(lru))
      /\ Range(free) \cap Range(lru) = {}
S4 == Range(lru) = Unowned \cap Keyed /\ Range(free) = Unowned \ Keyed
S8 == \A a, b \in Keyed : key[a] = key[b] => a = b
S10 == \A r \in 1 .. Len(req) : req[r].status # "finished" =>
         Len(req[r].table) = CeilDiv(req[r].dispatched, BlockSize)
S14 == flight = <<>> /\ Ids(req, "finished") = 1 .. Len(req) => Unowned = Blocks
S18 == /\ Cardinality(Ids(req, "running")) <= Cap
       /\ \A r \in 1 .. Len(req) : /\ req[r].computed <= req[r].dispatched
                                   /\ req[r].dispatched <= req[r].total
                                   /\ Len(req[r].tokens) <= req[r].limit
L2 == Ids(req, "running") \cup Ids(req, "waiting") # {} => flight # <<>> \/ Plan.rows # <<>>
L7 == \A r \in Ids(req, "finished") :
        req[r].table # <<>> => \E i \in 1 .. Len(flight) : \E j \in 1 .. Len(flight[i]) :
                                 flight[i][j].r = r
\* L1, for UserActions = FALSE: whoever arrives finishes.
L1 == \A r \in 1 .. NumRequests : [](Len(req) >= r => <>(Len(req) >= r /\ req[r].reason # ""))
=============================================================================

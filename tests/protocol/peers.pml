/* SPDX-License-Identifier: Apache-2.0 */
/* The flags among the ranks of a group (kernels_src/comm/peers.cuh) for the model checker spin: R
 * ranks go through forward, forward, backward, backward of two layers that share an arena, each at a
 * speed of its own. Names in lower case and flags are the kernels'; test_protocol.py runs it.
 *
 * A slot of an arena holds who wrote it in which call, and a reader knows whom it expects: it notices
 * a slot that is not written yet or overwritten too early. LATE marks a store that no release of its
 * writer has covered. Such a store may have landed or not, and it always changes the slot, so whoever
 * else reads the slot reads wrong in one of the two cases: landing needs no steps of its own.
 *
 * Steps end where a rank waits. In between others see nothing of it but flags, and a flag that is
 * told early and seen late is one that is told late. What is written is written at the earliest.
 *
 * A rank sends each rank one row or none. Rows of a list and slots for results are numbered without
 * gaps, as in the kernels, so that other ranks may write them in the other layer.
 *
 * Switches: CHAINED and RECOMPUTE, other forms of the calls. MISSING_RELEASE=flag, EARLY_REUSE,
 * SKIPPED_DONE, UNAWAITED_READY, STALE_READY: faults to be found. GIVE_UP, FAULTY_STOPS: see there.
 */
#ifndef R
#define R 2
#endif
#define ALL ((1 << R) - 1)
#define kCounts 0
#define kPlaced 1
#define kReady 2
#define kDone 3
#define FLAG(kind, owner, sender) flags[((kind) * R + (owner)) * R + (sender)]
#define REACHED(kind, sender) (FLAG(kind, me, sender) >= epoch)
#if R == 2
#define ALL_REACHED(kind) (REACHED(kind, 0) && REACHED(kind, 1))
#else
#define ALL_REACHED(kind) (REACHED(kind, 0) && REACHED(kind, 1) && REACHED(kind, 2))
#endif

/* Arenas: every region of every rank. */
#define counts(owner, sender) ((owner) * R + (sender))
#define rows(owner, row) (R * R + (owner) * R + (row))
#define results(owner, slot) (2 * R * R + (owner) * R + (slot)) /* and dscore */
#define tokens(owner) (3 * R * R + (owner))
#define grads(owner) (3 * R * R + R + (owner))
#define SLOTS (3 * R * R + 2 * R)
#define LATE 128
#define TAG(call, writer) ((call) << 2 | (writer))
#define WRITER(tag) ((tag) & 3)

/* Whether `to` has an expert for a token of `from`; where its row stands there, and its result. */
#define CALLS 4
#define BACKWARD 3 /* the first call that is one */
#define LAYER (epoch == 2 || epoch == 3)
#define SENDS(from, to) (route[LAYER] >> ((from) * R + (to)) & 1)
#define OWNS_ANY (route[LAYER] >> (me * R) & ALL)
#define ROW(from, to) ((from > 0 && SENDS(0, to)) + (from > 1 && SENDS(1, to)))
#define SLOT(from, to) \
    ((to > 0 && from != 0 && SENDS(from, 0)) + (to > 1 && from != 1 && SENDS(from, 1)))
#define PEER(s) (s != me && SENDS(s, me) && !DROPPED)
#define PEERS_WITH_ROWS_HERE (PEER(0) | PEER(1) << 1 | (R > 2 && PEER(2)) << 2)

/* GIVE_UP: a wait may run out of time while it lasts, in any rank. What has to hold then: a rank that
 * ends a call without a fault has read right. FAULTY_STOPS: a rank with a fault writes to no arena. */
#ifdef GIVE_UP
#define CHECKED_LATER 1
#define OR_FAULT(reached, drop) \
    :: d_step { !(reached) -> fault = 1; dropped = dropped | (drop) << LAYER }
#else
#define CHECKED_LATER 0
#define OR_FAULT(reached, drop)
#endif
#define DROPPED (dropped >> LAYER & 1)
#ifdef FAULTY_STOPS
#define MAY_WRITE (fault == 0)
#else
#define MAY_WRITE 1
#endif

byte flags[4 * R * R];
byte slots[SLOTS];
short route[2];

inline STORE(slot) {
    /* Two stores on their way to one place: either may be the last. */
    right = right && ((slots[slot] & LATE) == 0 || WRITER(slots[slot]) == me);
    assert(CHECKED_LATER || right);
    slots[slot] = LATE | TAG(epoch, me)
}

inline LOAD(slot, writer) {
    right = right && (slots[slot] & ~(writer == me -> LATE : 0)) == TAG(epoch, writer);
    assert(CHECKED_LATER || right)
}

/* What a flag covers: kCounts what its CTA wrote, kPlaced what the cluster that plans wrote, kReady
 * all of the launches before, but not what other CTAs of its own launch push, kDone everything. */
inline RELEASE(kind, peer) {
    i = 0;
    do
    :: i == SLOTS -> break
    :: i < SLOTS ->
        if
        :: ((slots[i] & LATE) && WRITER(slots[i]) == me
            && (kind != kCounts || i == counts(peer, me))
            && (kind != kPlaced || i < results(0, 0))
            && (kind != kReady || i < results(0, 0) || i >= tokens(0))) ->
            slots[i] = slots[i] & ~LATE
        :: else
        fi;
        i++
    od;
    i = 0
}

inline tell(kind, peer) {
#ifdef MISSING_RELEASE
    if
    :: kind != MISSING_RELEASE -> RELEASE(kind, peer)
    :: else
    fi;
#else
    RELEASE(kind, peer);
#endif
    assert(FLAG(kind, peer, me) <= epoch); /* never goes back */
    FLAG(kind, peer, me) = epoch
}

inline TELL_ALL(kind) {
    s = 0;
    do
    :: s < R -> tell(kind, s); s++
    :: else -> break
    od;
    s = 0
}

inline send_counts() {
    s = 0;
    do
    :: s < R && MAY_WRITE -> STORE(counts(s, me)); s++
    :: else -> break
    od;
    s = 0;
    if
    :: MAY_WRITE -> TELL_ALL(kCounts)
    :: else
    fi
}

inline place_experts() {
    s = 0;
    do
    :: s < R -> LOAD(counts(me, s), s); s++
    :: else -> break
    od;
    s = 0
}

inline send_rows() {
    s = 0;
    do
    :: s < R ->
        if
        :: SENDS(me, s) -> STORE(rows(s, ROW(me, s)))
        :: else
        fi;
        s++
    :: else -> break
    od;
    TELL_ALL(kPlaced)
}

inline keep_list() {
    s = 0;
    do
    :: s < R ->
        if
        :: SENDS(s, me) -> LOAD(rows(me, ROW(s, me)), s)
        :: else
        fi;
        s++
    :: else -> break
    od;
    s = 0
}

inline stage(region) {
    if
    :: OWNS_ANY && MAY_WRITE -> STORE(region + me)
    :: else
    fi
}

inline plan_peers() {
    d_step {
#ifdef EARLY_REUSE
        if
        :: epoch == 1 -> stage(tokens(0))
        :: else
        fi;
#else
        stage(tokens(0));
#endif
        send_counts()
    }
    if
    :: d_step { ALL_REACHED(kCounts) -> place_experts(); send_rows() }
    OR_FAULT(ALL_REACHED(kCounts), 1)
    fi;
    if
    :: DROPPED
    :: else ->
        if
        :: d_step { ALL_REACHED(kPlaced) -> keep_list() }
        OR_FAULT(ALL_REACHED(kPlaced), 1)
        fi
    fi
}

inline stage_peers() {
    d_step {
#ifndef EARLY_REUSE
        stage(tokens(0));
#endif
        stage(grads(0))
    }
}

inline push_to_peers(to) {
    s = 0;
    do
    :: s < R ->
        if
        :: ((to) >> s & 1) && MAY_WRITE -> STORE(results(s, SLOT(s, me)))
        :: else
        fi;
        s++
    :: else -> break
    od;
    s = 0
}

#if defined(UNAWAITED_READY)
#define READY(s) 1
#elif defined(STALE_READY)
#define READY(s) (FLAG(kReady, me, s) != 0)
#else
#define READY(s) REACHED(kReady, s)
#endif

#define PULL_FROM_PEER(region, s, chained) \
    :: d_step { \
        ((pulling >> s & 1) && READY(s)) -> \
        LOAD(region + s, s); \
        pulling = pulling & ~(1 << s); \
        push_to_peers(chained << s) \
    }

#ifdef GIVE_UP
#define UNREADY(s) ((pulling >> s & 1) && !READY(s))
#define OR_GIVE_UP_PULLING \
    :: d_step { UNREADY(0) || UNREADY(1) || (R > 2 && UNREADY(R - 1)) -> fault = 1; pulling = 0 }
#else
#define OR_GIVE_UP_PULLING
#endif

/* A launch whose CTAs pull, push and tell at once. What it pushes was pulled by earlier launches or,
 * where it is chained, by itself. */
inline grouped_gemm(region, pulls, pushes, chained) {
    d_step {
        pulling = pulls * (PEERS_WITH_ROWS_HERE);
        push_to_peers(pushes * (PEERS_WITH_ROWS_HERE))
    }
    told = 0;
    do
    :: d_step { told == 0 -> TELL_ALL(kReady); told = 1 }
    PULL_FROM_PEER(region, 0, chained)
    PULL_FROM_PEER(region, 1, chained)
#if R > 2
    PULL_FROM_PEER(region, 2, chained)
#endif
    OR_GIVE_UP_PULLING
    :: d_step { (told == 1 && pulling == 0) -> told = 0 }; break
    od
}

inline combine() {
    d_step {
        s = 0;
        do
        :: s < R ->
            if
            :: s != me && SENDS(me, s) && fault == 0 -> LOAD(results(me, SLOT(me, s)), s)
            :: else
            fi;
            s++
        :: else -> break
        od;
        s = 0;
        assert(fault || right)
    }
}

#ifdef SKIPPED_DONE
#define TELLS_DONE (OWNS_ANY || PEERS_WITH_ROWS_HERE)
#else
#define TELLS_DONE 1
#endif

inline finish() {
    d_step {
        if
        :: fault == 0 && TELLS_DONE -> TELL_ALL(kDone)
        :: else
        fi;
#ifdef EARLY_REUSE
        epoch++; /* the next call's tokens */
        if
        :: epoch <= CALLS -> stage(tokens(0))
        :: else
        fi;
        epoch--
#endif
    }
    if
    :: fault
    :: ALL_REACHED(kDone)
    OR_FAULT(ALL_REACHED(kDone), 0)
    fi
}

inline gate_up_peers() { grouped_gemm(tokens(0), 1, 0, 0) }
inline down_peers() { grouped_gemm(tokens(0), 0, 1, 0); finish() }
inline pk_forward() { grouped_gemm(tokens(0), 1, 1, 1); finish() }
inline down_grad_peers() { grouped_gemm(grads(0), 1, 0, 0) }
inline gate_up_grad_peers() { grouped_gemm(tokens(0), 1, 1, 0); finish() }

proctype Rank(byte me) {
    byte epoch, pulling, s, i;
    byte dropped; /* layers whose rows the plan dropped */
    bit told, fault, right = 1;
    do
    :: epoch == CALLS -> break
    :: epoch + 1 < BACKWARD ->
        epoch++;
        plan_peers();
#ifdef CHAINED
        pk_forward();
#else
        gate_up_peers();
        down_peers();
#endif
        combine()
    :: epoch + 1 >= BACKWARD && epoch < CALLS ->
        epoch++;
        stage_peers();
#ifdef RECOMPUTE
        gate_up_peers(); /* where z was not kept */
#endif
        down_grad_peers();
        gate_up_grad_peers();
        combine()
    od
}

/* Bit R * from + to: two ranks try every pair of routings; three every routing in one layer and what
 * it leaves out in the other, and some that are the same in both. */
init {
    short any;
    atomic {
#if defined(GIVE_UP)
        select(any : 0 .. 3);
        route[0] = 2 * any;
        select(any : 0 .. 3);
        route[1] = 2 * any;
#elif R == 2
        select(any : 0 .. 15);
        route[0] = any;
        select(any : 0 .. 15);
        route[1] = any;
#else
        select(any : 0 .. 511);
        route[0] = any;
        if
        :: route[1] = 511 - any
        :: any == 511 || any == 219 || any == 455 || any == 98 || any == 342 -> route[1] = any
        fi;
#endif
        any = 0;
        run Rank(0);
        run Rank(1);
#if R > 2
        run Rank(2);
#endif
    }
}

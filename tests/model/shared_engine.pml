/* The shared engine's phases, its two ways of using the slots, and the sleep between: a model of
 * src/engines/shared. A comment "model: NAME" in the code stands where the comment NAME stands here.
 *
 *   channel.hpp      wake_sleepers(): look
 *   channel.cpp       end_phase(): raise, scan, wake_all
 *   channel_wait.cpp  increment_wake_counter(): increment, wake; sleep(): register, fence, read_counter, poll, block, deregister
 *   collectives.cpp   reduce_flat(): put, take; reduce_sliced(): put, reduce, publish, copy
 *
 * Every rank makes the same calls: N_SMALL_BEFORE small ones, a large one of N_CHUNKS chunks,
 * N_SMALL_AFTER small ones of N_SMALL_CHUNKS, so that small and large calls follow each other both ways.
 *
 * -DDEATHS, -DSTOPS: between any two steps, one rank dies, or stops and later continues.
 *
 * Checked, over all interleavings:
 *   no lost wake-up          a rank that sleeps for ever is an invalid end state (the code's own
 *                            look around every 20 ms, which would hide it, is in the model only
 *                            while a rank is dead or stopped)
 *   no wait without end      the same, if a rank dies: at its next look each of the others finds
 *                            either the phase complete or that rank missing, and then fails
 *   no unpublished slot      a reader finds the phase it expects, at the start and at the end
 *   no reuse while read      a writer finds no reader
 *   no other flag            a flag holds the phase waited for, or the one three before
 *
 * One step is one atomic operation of the code, all of which are sequentially consistent or pairs
 * of release and acquire on a flag; data races inside a slot show as the failures above. The one
 * store that may pass a later load is that of a flag where sleepers fence: there `raise` may come
 * after `look`, and `fence` waits until no rank is between the two. Two ranks swap their slots, as in
 * the code. Not in the model: deadlines (a stopped rank may be missed at any time), mismatches, point to
 * point.
 *
 * -DBROKEN_... breaks the model as its name says; check.sh sees that each is found.
 */
#ifndef N
#define N 2
#endif
#ifndef N_CHUNKS
#define N_CHUNKS 2
#endif
#ifndef N_SMALL_CHUNKS
#define N_SMALL_CHUNKS 1
#endif
#ifdef BROKEN_TWO_SLOTS
#define SLOTS 2
#else
#define SLOTS 3
#endif

#define AT(r, phase) ((r) * SLOTS + (phase) % SLOTS)
#if N == 2
#define SLOT(r, phase) AT(((r) + (phase) / SLOTS) % 2, phase)
#else
#define SLOT(r, phase) AT(r, phase)
#endif

byte flag[N * SLOTS];      /* phase last raised */
#ifdef BROKEN_COUNT
byte n_arrivals;           /* ready by a count of the flags, missing by the flags */
#endif
byte wake_counter;
byte n_sleepers;
bool is_blocked[N];        /* in the kernel */
bool has_looked[N];        /* before its own flag can be seen */

/* Of each slot, the phase whose chunk it holds: as published by its rank, and with the rank's slice
 * REDUCED, which replaces that part of it. */
#define PUBLISHED 0
#define REDUCED (N * SLOTS)
byte held[2 * N * SLOTS];
byte n_readers[2 * N * SLOTS];

#if defined DEATHS || defined STOPS
#define DISTURBED
byte victim = N;           /* dead or stopped; N: nobody */
bool has_failed;
#else
#define has_failed false
#endif

#ifdef DEATHS
#define IS_DEAD(r) (victim == (r))
#else
#define IS_DEAD(r) false
#endif
#define RAISED(r) (flag[AT(r, phase)] == phase)
#if defined BROKEN_COUNT
#define READY (n_arrivals >= phase * N)
#elif defined OVERSUBSCRIBED && N == 2
#define READY RAISED(1 - _pid)
#elif defined OVERSUBSCRIBED && N == 3
#define READY (RAISED((_pid + 1) % 3) && RAISED((_pid + 2) % 3))
#else
#define READY RAISED(peer)
#endif

inline wake_all() {
/* increment */
  wake_counter++;
/* wake */
  d_step {
    i = 0;
    do
    :: i < N -> is_blocked[i] = false; i++
    :: else -> break
    od;
    i = 0
  }
}

inline wake_sleepers() {
/* look */
  if
  :: n_sleepers == 0
  :: else -> wake_all()
  fi
}

inline raise() {
/* raise */
  assert(phase <= SLOTS || flag[AT(_pid, phase)] == phase - SLOTS);
  flag[AT(_pid, phase)] = phase
}

/* One poll. If oversubscribed, of every flag, by a cursor that stays where it is until the next poll. */
#if defined OVERSUBSCRIBED && !defined BROKEN_COUNT
#define IS_READY (peer == N)
inline poll_flags() {
  do
  :: atomic { peer < N && (peer == _pid || RAISED(peer)) -> peer++ }
  :: peer < N && peer != _pid && !RAISED(peer) -> break
  :: peer == N -> break
  od
}
#else
#define IS_READY READY
#define poll_flags() skip
#endif

/* wait() and sleep(); the polls before are one poll */
inline wait_until_ready() {
  poll_flags();
  do
  :: IS_READY -> break
#ifdef DISTURBED
  :: !IS_READY && has_failed -> goto failed
#endif
  :: !IS_READY && !has_failed ->
/* register */
     n_sleepers++;
#if !defined OVERSUBSCRIBED && !defined BROKEN_NO_FENCE
/* fence */
     do
     :: i < N -> !has_looked[i] || IS_DEAD(i); i++
     :: else -> i = 0; break
     od;
#endif
/* read_counter */
     seen_counter = wake_counter;
#ifndef BROKEN_NO_SECOND_POLL
/* poll */
     poll_flags();
     if
     :: IS_READY || has_failed
     :: !IS_READY && !has_failed ->
#endif
/* block */
        atomic {
          if
          :: wake_counter == seen_counter -> is_blocked[_pid] = true
          :: else
          fi
        }
        if
        :: !is_blocked[_pid]
#ifdef DISTURBED
        /* the look every 20 ms: check_peer_liveness() and late(), where they find something */
        :: atomic { victim < N && READY -> is_blocked[_pid] = false }
        :: atomic {
             victim < N && victim != _pid && !READY && !RAISED(victim) ->
             is_blocked[_pid] = false;
             has_failed = true
           }
           wake_all()
#endif
        fi;
#ifndef BROKEN_NO_SECOND_POLL
     fi;
#endif
/* deregister */
     d_step { n_sleepers--; seen_counter = 0 }
     poll_flags()
  od
}

/* Channel::end_phase() */
inline turn() {
#ifdef OVERSUBSCRIBED
  raise();
#ifdef BROKEN_COUNT
  atomic { n_arrivals++; is_last = (n_arrivals == phase * N) }
#else
/* scan */
  peer = 0;
  poll_flags();
  is_last = IS_READY;
#endif
/* wake_all */
  if
  :: is_last -> wake_sleepers()
  :: else
  fi;
#ifndef BROKEN_NO_WAIT
  wait_until_ready();
#endif
  peer = 0;
#else
#ifdef BROKEN_WAKE_BEFORE_RAISE
  wake_sleepers();
  raise();
#else
  if
  :: raise(); wake_sleepers()
  :: d_step { has_looked[_pid] = true; is_last = n_sleepers > 0 }
     d_step { raise(); has_looked[_pid] = false }
     if
     :: is_last -> wake_all()
     :: else
     fi
  fi;
#endif
#ifndef BROKEN_NO_WAIT
  peer = 0;
  do
  :: peer < N && peer == _pid -> peer++
  :: peer < N && peer != _pid -> wait_until_ready(); peer++
  :: peer == N -> break
  od;
  peer = 0;
#endif
#endif
  phase++
}

inline put() {
  d_step {
    assert(n_readers[PUBLISHED + SLOT(_pid, phase)] == 0 && n_readers[REDUCED + SLOT(_pid, phase)] == 0);
    held[PUBLISHED + SLOT(_pid, phase)] = phase;
    held[REDUCED + SLOT(_pid, phase)] = 0
  }
}

/* A reader holds all its peers' slots from its first look to its last: longer than the code. */
inline read(what, back) {
  d_step {
    peer = 0;
    do
    :: peer < N ->
       if
       :: peer != _pid ->
          assert(held[what + SLOT(peer, phase - back)] == phase - back);
          n_readers[what + SLOT(peer, phase - back)]++
       :: else
       fi;
       peer++
    :: else -> break
    od;
    peer = 0
  }
  d_step {
    do
    :: peer < N ->
       if
       :: peer != _pid ->
          assert(held[what + SLOT(peer, phase - back)] == phase - back);
          n_readers[what + SLOT(peer, phase - back)]--
       :: else
       fi;
       peer++
    :: else -> break
    od;
    peer = 0
  }
}

/* reduce_flat(), in exchange() */
inline small_call() {
  chunk = 0;
  do
  :: chunk <= N_SMALL_CHUNKS ->
     if
     :: chunk < N_SMALL_CHUNKS ->
/* put */
        put()
     :: else
     fi;
     if
     :: chunk > 0 ->
/* take */
        read(PUBLISHED, 1)
     :: else
     fi;
     if
     :: chunk < N_SMALL_CHUNKS -> turn()
     :: else
     fi;
     chunk++
  :: else -> break
  od;
  chunk = 0
}

/* reduce_sliced() */
inline large_call() {
  chunk = 0;
  do
  :: chunk < N_CHUNKS + 2 ->
/* put */
     if
     :: chunk < N_CHUNKS -> put()
     :: else
     fi;
     if
     :: chunk >= 1 && chunk <= N_CHUNKS ->
/* reduce */
        read(PUBLISHED, 1);
/* publish */
        d_step {
          assert(n_readers[REDUCED + SLOT(_pid, phase - 1)] == 0);
          held[REDUCED + SLOT(_pid, phase - 1)] = phase - 1
        }
     :: else
     fi;
     if
     :: chunk >= 2 ->
/* copy */
        read(REDUCED, 2)
     :: else
     fi;
     if
     :: chunk <= N_CHUNKS -> turn()
     :: else
     fi;
     chunk++
  :: else -> break
  od
}

inline calls() {
  do
  :: call == N_SMALL_BEFORE -> large_call(); chunk = 0; call++
  :: call != N_SMALL_BEFORE && call <= N_SMALL_BEFORE + N_SMALL_AFTER -> small_call(); call++
  :: call > N_SMALL_BEFORE + N_SMALL_AFTER -> break
  od
}

active [N] proctype rank()
#ifdef STOPS
  provided (victim != _pid)
#endif
{
  byte phase = 1;
  byte peer, i, seen_counter, chunk, call;
  bool is_last;
#ifdef DEATHS
  {
    calls();
failed:
    skip
  } unless { victim == _pid }
#else
  calls();
failed:
  skip
#endif
}

#ifdef DISTURBED
active proctype disturb() {
  if
  :: skip  /* nobody */
  :: victim = 0
  :: victim = N - 1
  fi;
#ifdef STOPS
  victim = N
#endif
}
#endif

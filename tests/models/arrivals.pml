/* Counted arrivals (src/net/proxy.cc, handle_arrival): two ranks exchange one chunk of two pieces per epoch over a
 * network that delivers pieces in any order; the destination counts them and publishes the stamp.
 *
 * Proved: a stamp comes only when all pieces of its epoch are there, also when pieces of the next epoch are among
 * them, and everybody ends. Variants that must fail: ONE_COUNTER (both parities share one), EAGER (the first piece
 * publishes), NO_RESET (the count goes on from epoch to epoch and is compared with one put's pieces).
 */
#define FIRST 11
#define LAST 17
#define PIECES 2
#define USE(e) ((((e) + 1) >> 1) & 7)
#define REACHED(value, target) ((((value) - (target)) & 7) < 4)
#define PARITY(e) ((e) & 1)
#define AT(rank, e) ((rank) * 2 + PARITY(e))
#ifdef ONE_COUNTER
#define COUNTER(rank, e) ((rank) * 2)
#else
#define COUNTER(rank, e) AT(rank, e)
#endif

byte arrival0[4], arrival1[4];
byte stamp[4];
byte count[4];

/* A piece is {epoch, piece}; any piece on the wire may be the next to land. */
chan wire0 = [4] of { byte, byte };
chan wire1 = [4] of { byte, byte };
chan landed0 = [2] of { byte };  /* arrivals that rank 0 has not polled: epochs */
chan landed1 = [2] of { byte };

proctype Rank(byte rank; chan wire) {
  byte e = FIRST;
  do
  :: e > LAST -> break
  :: else ->
     wire!e, 0;
     wire!e, 1;
     REACHED(stamp[AT(rank, e)], USE(e));
     assert(arrival0[AT(rank, e)] == e);
     assert(arrival1[AT(rank, e)] == e);
     e++
  od
}

/* Lands any piece that is on the wire, then tells the destination of it. */
proctype Network(byte rank; chan wire; chan landed) {
  byte carried = 0;
  byte e, piece;
  byte n;
  do
  :: carried == (LAST - FIRST + 1) * PIECES -> break
  :: else ->
     atomic {
       /* Turns the wire a few times, so that any of its pieces may come first. */
       nempty(wire) ->
       n = 0;
       do
       :: n < len(wire) - 1 -> wire?e, piece; wire!e, piece; n++
       :: break
       od;
       wire?e, piece;
       n = 0
     };
     if
     :: piece == 0 -> arrival0[AT(1 - rank, e)] = e
     :: else -> arrival1[AT(1 - rank, e)] = e
     fi;
     landed!e;
     carried++
  od
}

proctype Proxy(byte rank; chan landed) {
  byte polled = 0;
  byte e;
  do
  :: polled == (LAST - FIRST + 1) * PIECES -> break
  :: else ->
     landed?e;
     polled++;
     count[COUNTER(rank, e)]++;
     if
#ifdef EAGER
     :: true ->
#else
     :: count[COUNTER(rank, e)] < PIECES
     :: count[COUNTER(rank, e)] >= PIECES ->
#endif
#ifndef NO_RESET
        count[COUNTER(rank, e)] = 0;
#endif
        stamp[AT(rank, e)] = USE(e)
     fi
  od
}

init {
  atomic {
    byte i;
    for (i : 0 .. 1) {
      stamp[AT(i, FIRST - 1)] = USE(FIRST - 1);
      stamp[AT(i, FIRST - 2)] = USE(FIRST - 2)
    }
    run Rank(0, wire0);
    run Rank(1, wire1);
    run Network(0, wire0, landed1);
    run Network(1, wire1, landed0);
    run Proxy(0, landed0);
    run Proxy(1, landed1)
  }
}

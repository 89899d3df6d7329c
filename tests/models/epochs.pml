/* Flags and double buffers (reliability.md, rules 1 and 5): two ranks exchange one chunk per epoch, without barriers.
 *
 * In every epoch a rank writes its chunk into a source of the epoch's parity and posts it; the network reads it some
 * time later, word by word, writes it into the peer's arrival buffer of that parity, then the stamp. Another lane of
 * the rank waits for the peer's stamp and reads the arrival. A rank begins the next epoch when both lanes are done.
 *
 * Stamps are uses of a parity, modulo 8 and compared by signed distance; epochs begin at 11, so stamps wrap.
 *
 * Proved: no payload is read before it is whole or after it was overwritten, no source is overwritten before the
 * network has read it, and everybody ends. Variants that must fail: NO_COMPLETION_WAIT (a rank goes on when its sends
 * are posted), ONE_BUFFER (no parity), STAMP_FIRST (the network breaks its contract).
 */
#define FIRST 11
#define LAST 19
#define USE(e) ((((e) + 1) >> 1) & 7)
#define REACHED(value, target) ((((value) - (target)) & 7) < 4)
#ifdef ONE_BUFFER
#define PARITY(e) 0
#else
#define PARITY(e) ((e) & 1)
#endif
#define AT(rank, parity) ((rank) * 2 + (parity))

/* Each payload has two words, so that it can be torn. Index: AT(rank, parity). */
byte source0[4], source1[4];
byte arrival0[4], arrival1[4];
byte stamp[4];

byte started[2];    /* the epoch that a rank is in */
byte sent[2];       /* the last epoch whose send lane is done */
byte received[2];   /* the last epoch whose receive lane is done */

chan wire0 = [2] of { byte };  /* epochs posted by rank 0, by rank 1 */
chan wire1 = [2] of { byte };

proctype SendLane(byte rank; chan wire) {
  byte e = FIRST;
  do
  :: e > LAST -> break
  :: else ->
     started[rank] >= e;
     source0[AT(rank, PARITY(e))] = e;
     source1[AT(rank, PARITY(e))] = e;
     wire!e;
     sent[rank] = e;
     e++
  od
}

proctype ReceiveLane(byte rank) {
  byte e = FIRST;
  do
  :: e > LAST -> break
  :: else ->
     started[rank] >= e;
     REACHED(stamp[AT(rank, PARITY(e))], USE(e));
     assert(arrival0[AT(rank, PARITY(e))] == e);
     assert(arrival1[AT(rank, PARITY(e))] == e);
     received[rank] = e;
     e++
  od
}

proctype Rank(byte rank) {
  byte e = FIRST;
  do
  :: e > LAST -> break
  :: else ->
     started[rank] = e;
     sent[rank] == e;
#ifndef NO_COMPLETION_WAIT
     received[rank] == e;
#endif
     e++
  od
}

proctype Network(byte rank; chan wire) {
  byte e = FIRST;
  byte posted, word;
  byte peer = 1 - rank;
  do
  :: e > LAST -> break
  :: else ->
     wire?posted;
#ifdef STAMP_FIRST
     stamp[AT(peer, PARITY(posted))] = USE(posted);
#endif
     word = source0[AT(rank, PARITY(posted))];
     assert(word == posted);
     arrival0[AT(peer, PARITY(posted))] = word;
     word = source1[AT(rank, PARITY(posted))];
     assert(word == posted);
     arrival1[AT(peer, PARITY(posted))] = word;
#ifndef STAMP_FIRST
     stamp[AT(peer, PARITY(posted))] = USE(posted);
#endif
     e++
  od
}

init {
  atomic {
    /* The state after epochs 9 and 10. */
    byte i;
    for (i : 0 .. 1) {
      stamp[AT(i, PARITY(FIRST - 1))] = USE(FIRST - 1);
      stamp[AT(i, PARITY(FIRST - 2))] = USE(FIRST - 2)
    }
    run SendLane(0, wire0);
    run SendLane(1, wire1);
    run ReceiveLane(0);
    run ReceiveLane(1);
    run Rank(0);
    run Rank(1);
    run Network(0, wire0);
    run Network(1, wire1)
  }
}

/* The command ring (src/net/ring.h): two producers, one consumer, depth 2.
 *
 * Positions count modulo 16 and start at 13, so that they wrap; laps have 2 bits, so a lap comes back every 8
 * positions. Every shared access is a step of its own. The model is sequentially consistent: it proves the algorithm,
 * not the memory orders, which ThreadSanitizer watches in ring_test.cc.
 *
 * Proved: every record is taken once, in order of reservation; no slot is written before its last record was read;
 * everybody ends, also when the ring was full. Variants that must fail: NO_BACK_PRESSURE, NO_LAP, EARLY_POP, NO_CAS.
 */
#define DEPTH 2
#define START 13
#define PUSHES 5            /* per producer; 10 positions in all, more than the 8 that laps tell apart */
#define MOD(x) ((x) & 15)
#define SLOT(p) ((p) & 1)
#define LAP(p) ((((p) >> 1) + 1) & 3)

byte head = START;
byte tail = START;
byte slot_lap[DEPTH];
byte slot_value[DEPTH];

/* Ghosts: what was reserved at a position, and whether a slot holds a record that nobody has read. */
byte reserved[16];
bool unread[DEPTH];
byte taken = 0;

proctype Producer(byte id) {
  byte i = 0;
  byte position, seen_tail;
  do
  :: i == PUSHES -> break
  :: else ->
     position = head;
reserve:
     seen_tail = tail;
     if
#ifdef NO_BACK_PRESSURE
     :: true ->
#else
     :: MOD(position - seen_tail) == DEPTH -> position = head; goto reserve
     :: MOD(position - seen_tail) > DEPTH -> position = head; goto reserve
     :: MOD(position - seen_tail) < DEPTH ->
#endif
#ifdef NO_CAS
        head = MOD(position + 1);
        reserved[position] = id * 8 + i;
#else
        atomic {
          if
          :: head == position ->
             head = MOD(position + 1);
             reserved[position] = id * 8 + i
          :: else -> position = head; goto reserve
          fi
        }
#endif
     fi;
     d_step {  /* one store of one word */
       assert(!unread[SLOT(position)]);
       unread[SLOT(position)] = true;
       slot_lap[SLOT(position)] = LAP(position);
       slot_value[SLOT(position)] = id * 8 + i
     };
     i++
  od
}

proctype Consumer() {
  byte next = START;
  byte value;
  do
  :: taken == 2 * PUSHES -> break
  :: else ->
#ifdef EARLY_POP
     slot_lap[SLOT(next)] == LAP(next);
     tail = MOD(next + 1);
     d_step { value = slot_value[SLOT(next)]; unread[SLOT(next)] = false };
#else
     d_step {  /* one load of one word */
#ifdef NO_LAP
       head != next;
#else
       slot_lap[SLOT(next)] == LAP(next);
#endif
       value = slot_value[SLOT(next)];
       unread[SLOT(next)] = false
     };
#endif
     assert(value == reserved[next]);
     next = MOD(next + 1);
     taken++;
#ifndef EARLY_POP
     tail = next
#endif
  od;
  assert(head == next)
}

init {
  atomic {
    /* As in the constructor: every slot looks like the lap before. */
    slot_lap[SLOT(START)] = LAP(MOD(START - DEPTH));
    slot_lap[SLOT(START + 1)] = LAP(MOD(START + 1 - DEPTH));
    slot_value[0] = 255;
    slot_value[1] = 255;
    run Producer(1);
    run Producer(2);
    run Consumer()
  }
}

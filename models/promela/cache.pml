/* A hybrid prefix cache in a small world: one full-attention and one recurrent group, no drafts, no external store.

   Written by hand and not made from spec/machine, as a second opinion: what is charged is counted from the layout of
   the tables and not asked of a rule, and every row asserts that what it reads is its own prefix. Numbers that may be
   -1 over there are one more here (previous, column, cached, partial), so that everything fits a byte.

   A move is one d_step: between moves the states are those of the abstract machine, one to one. At the end of each
   move the state is printed in the words of projection.py, unless QUIET is defined.

   The world is given with -D: BLOCKS, BLOCK, UNIT, STEP, RUNNING, MODEL, REQUESTS, OUTPUTS, and two prompts of LEN0 and
   LEN1 tokens of which the first SHARED are the same. ABORT, PREEMPT and EVICT say what may happen besides submissions
   and steps, MUTANT_* plants a fault. */

#define ATTENTION 0
#define RECURRENT 1
#define STATE 1                          /* what a block holds: one recurrent state, */
#define TOKENS 2                         /* or attention of one token after the other */
#define NOTHING 255

/* Prefixes by number: prompt 0 and what is put out on it, then what prompt 1 does not share with it. 0: empty. */
#define OWN (LEN0 + OUTPUTS)
#define PREFIXES (1 + OWN + LEN1 + OUTPUTS - SHARED)
#define prefix(p, n) ((p) == 0 || (n) <= SHARED -> (n) : OWN + (n) - SHARED)
#define tokens_of(s) ((s) <= OWN -> (s) : (s) - OWN + SHARED)
#define prompt_of(p) ((p) == 0 -> LEN0 : LEN1)

#define FREE (BLOCKS - 1)
#define COLUMNS 4
#define NAMES (2 * PREFIXES)
#define named(g, s) ((g) * PREFIXES + (s))
#define first_of(nm) found[(nm) * FREE]
#define noted(blk) (key[(blk) * 2] == 0 -> 0 : tokens_of(key[(blk) * 2] % PREFIXES))
#define up(n) (((n) + BLOCK - 1) / BLOCK)
#define down(n) ((n) / BLOCK * BLOCK)
#define low(a, b) ((a) < (b) -> (a) : (b))
#define high(a, b) ((a) > (b) -> (a) : (b))
#define keyed(p) ((p) < queued && key[queue[p] * 2] != 0)
#define PARTIAL (UNIT < BLOCK)
#define GRAIN (PARTIAL -> UNIT : BLOCK)

typedef Request {
	byte prompt, known, computed, junction, preempted, prefilling, retired, previous, column;
	byte cached[2], partial, width[2];
	byte table[2 * COLUMNS];
	byte from, upto                      /* its row in a step; 0, 0: none */
}

Request r[REQUESTS + 1];                 /* running ones first, in order of admission, then those that wait */
byte running, here;
byte queue[FREE], queued;                /* from its front */
byte ref[BLOCKS], key[BLOCKS * 2];       /* the primary key first */
byte found[NAMES * FREE];                /* under each key its blocks, the first one first */
byte kind[BLOCKS], held[BLOCKS * BLOCK];

/* Scratch: of no meaning between moves. */
hidden int who, count, spot, nth, label, block, place, given, group, one, two;
hidden int start, end, offered, agreed, deep, stop, goal, last, tail, budget, cost, edge, upto;
hidden int slot, source, fresh, front, hits, state;
hidden byte hit[COLUMNS], made[NAMES];
hidden byte copies, group_of[4 * REQUESTS], source_of[4 * REQUESTS], target_of[4 * REQUESTS];
hidden byte kind_of[4 * REQUESTS], held_of[4 * REQUESTS * BLOCK];
hidden byte waits, inside, grown, ok, more, enters;

c_code {
#ifndef QUIET
static void show(void) {
	int p, g, c;
	for (p = 0; p < now.here; p++) {
		printf("%s %d/%d", p < now.running ? "runs" : "waits", now.r[p].prompt, now.r[p].known);
		printf(" at %d junction %d%s%s%s retired %d previous %d column %d", now.r[p].computed, now.r[p].junction,
			now.r[p].preempted ? " preempted" : "", now.r[p].prefilling ? " prefilling" : "",
			now.r[p].cached[1] ? " grown" : "", now.r[p].retired, now.r[p].previous - 1, now.r[p].column - 1);
		for (g = 0; g < 2; g++) {
			printf(" [cached %d partial %d:", now.r[p].cached[g] - 1, g ? now.r[p].partial - 1 : -1);
			for (c = 0; c < now.r[p].width[g]; c++)
				printf(" %d", now.r[p].table[g * COLUMNS + c]);
			printf("]");
		}
		printf("; ");
	}
	printf("free");
	for (c = 0; c < now.queued; c++)
		printf(" %d", now.queue[c]);
	for (p = 1; p < BLOCKS; p++) {
		printf("; %d ref %d", p, now.ref[p]);
		for (g = 0; g < 2 && now.key[2 * p + g]; g++)
			printf(" key %d.%d", now.key[2 * p + g] / (PREFIXES), now.key[2 * p + g] % (PREFIXES));
		if (now.kind[p])
			printf(now.kind[p] == 1 ? " state" : " tokens");
		for (c = 0; now.kind[p] && c < (now.kind[p] == 1 ? 1 : BLOCK); c++)
			if (now.held[BLOCK * p + c] == 255) printf(" -"); else printf(" %d", now.held[BLOCK * p + c]);
	}
	for (p = 0; p < NAMES; p++)
		if (now.found[p * (FREE) + 1]) {
			printf("; key %d.%d in", p / (PREFIXES), p % (PREFIXES));
			for (c = 0; c < FREE && now.found[p * (FREE) + c]; c++)
				printf(" %d", now.found[p * (FREE) + c]);
		}
	printf("\n");
}
#else
#define show()
#endif
}

#include "pool.pml"
#include "blocks.pml"
#include "step.pml"

/* -- moves --------------------------------------------------------------------------------------------------------- */

inline settle() {                        /* what lies in a block that is free and has no key can never be seen */
	count = 1;
	do
	:: count < BLOCKS ->
		if
		:: ref[count] == 0 && key[count * 2] == 0 ->
			kind[count] = 0;
			block = 0;
			do
			:: block < BLOCK -> held[count * BLOCK + block] = 0; block++
			:: else -> break
			od
		:: else -> skip
		fi;
		count++
	:: else -> break
	od;
	c_code { show(); }
}

inline evict() {                         /* the first free block loses its keys */
	given = queue[0];
	forget(given)
}

active proctype world() {
	d_step {
		count = 0;
		do
		:: count < FREE -> queue[count] = count + 1; count++
		:: else -> break
		od;
		queued = FREE;
		settle()
	}
	do
	:: d_step { here < REQUESTS -> submit(0); settle() }
	:: d_step { here < REQUESTS -> submit(1); settle() }
	:: d_step { here > 0 -> step(); settle() }
#ifdef ABORT
	:: d_step { here > 0 -> remove(0); settle() }
	:: d_step { here > 1 -> remove(1); settle() }
#endif
#ifdef PREEMPT
	:: d_step { running > 0 -> preempt(0); settle() }
	:: d_step { running > 1 -> preempt(1); settle() }
#endif
#ifdef EVICT
	:: d_step { keyed(0) || keyed(1) || keyed(2) || keyed(3) || keyed(4) || keyed(5) || keyed(6) -> evict(); settle() }
#endif
	od
}

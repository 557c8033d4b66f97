/* One request's lookup, chunk and blocks. Part of cache.pml. */

/* -- what the cache has of request who: agreed tokens, of attention the first hits of hit[], and a state --------- */

inline lookup() {
	deep = 0; hits = 0; state = 0;
	do
	:: deep + BLOCK < r[who].known && first_of(named(ATTENTION, prefix(r[who].prompt, deep + BLOCK))) != 0 ->
		deep = deep + BLOCK;
		hit[hits] = first_of(named(ATTENTION, prefix(r[who].prompt, deep)));
		hits++
	:: else -> break
	od;
	edge = (PARTIAL -> low(deep + BLOCK - UNIT, (r[who].known - 1) / UNIT * UNIT) : 0);
	do
	:: edge > deep && first_of(named(ATTENTION, prefix(r[who].prompt, edge))) == 0 -> edge = edge - UNIT
	:: else -> break
	od;
	if
	:: edge > deep -> deep = edge; hit[hits] = first_of(named(ATTENTION, prefix(r[who].prompt, deep)))
	:: else -> skip
	fi;
	agreed = deep;
	do
	:: agreed > 0 && first_of(named(RECURRENT, prefix(r[who].prompt, agreed))) == 0 -> agreed = agreed - GRAIN
	:: else -> break
	od;
	hits = up(agreed);
	if
	:: agreed > 0 -> state = first_of(named(RECURRENT, prefix(r[who].prompt, agreed)))
	:: else -> skip
	fi;
#ifdef MUTANT_JUNCTION
	r[who].junction = 0
#else
	r[who].junction = (deep > agreed -> deep : 0)
#endif
}

/* -- where a chunk of request who ends that begins at start and may go to offered: at end ------------------------ */

inline stop_here() {
	if
	:: start < stop && stop < end -> end = stop
	:: else -> skip
	fi
}

inline cut() {
	end = offered;
	last = high(prompt_of(r[who].prompt), r[who].known - 1);
	if
	:: start < last && start < offered ->
		if
		:: offered < last && (down(offered) > start || BLOCK <= STEP) -> end = down(offered)
		:: else -> skip
		fi;
		stop = (start % BLOCK == 0 -> 0 : down(start) + BLOCK);
		stop_here();
		last = down(r[who].known - 1);
		stop = last;
		stop_here();
		tail = (prompt_of(r[who].prompt) - 1) / UNIT * UNIT;
		stop = (PARTIAL && tail > last -> tail : 0);
		stop_here();
		stop = (start < r[who].junction && r[who].junction < offered -> start + down(r[who].junction - start) : 0);
		stop_here();
		end = high(start, end)
	:: else -> skip
	fi
}

/* -- blocks for request who -------------------------------------------------------------------------------------- */

inline charge() {                        /* cost: what leaves the queue up to goal; waits: for what this step makes */
	one = (r[who].cached[0] == 0 -> hits : r[who].width[0]);
	two = (r[who].cached[0] == 0 -> up(agreed) : r[who].width[1]);
	inside = r[who].cached[0] == 0 && agreed % BLOCK != 0;
#ifdef MUTANT_HASTE
	waits = false;
#else
	waits = (inside && made[key[hit[hits - 1] * 2]]) || (state != 0 && made[key[state * 2]]);
#endif
	cost = high(up(goal) - one, 0) + inside + (up(goal) > two) + (inside || r[who].partial != 0);
	cost = cost + (state != 0 && ref[state] == 0);
	count = 0;
	do
	:: count < hits -> cost = cost + (ref[hit[count]] == 0); count++
	:: else -> break
	od
}

inline retire() {                        /* states below the one that request who starts from are of no use to it */
	edge = low((start - (start > 0)) / BLOCK, r[who].width[1]);
	if
	:: r[who].retired < edge ->
		front = 0;
		count = edge;
		do
		:: count > r[who].retired ->
			count--;
			given = r[who].table[COLUMNS + count];
			r[who].table[COLUMNS + count] = 0;
			if
			:: given != 0 -> release(given)
			:: else -> skip
			fi
		:: else -> break
		od;
		r[who].retired = edge
	:: else -> skip
	fi
}

inline copy(CG) {                        /* source is copied to fresh before the forward; both are counted until then */
	group_of[copies] = CG;
	source_of[copies] = source;
	target_of[copies] = fresh;
	copies++
}

inline copy_for_writer(CG, CS) {         /* the shared block in column CS of group CG: its writer gets a copy */
	source = r[who].table[CG * COLUMNS + CS];
	take();
	r[who].table[CG * COLUMNS + CS] = fresh;
	ref[fresh]++;
	copy(CG)
}

inline adopt() {                         /* the hit blocks of both groups, before any other is taken */
	count = 0;
	do
	:: count < hits -> touch(hit[count]); r[who].table[count] = hit[count]; count++
	:: else -> break
	od;
	r[who].width[0] = hits;
	r[who].width[1] = hits;
	if
	:: state != 0 -> touch(state); r[who].table[COLUMNS + hits - 1] = state
	:: else -> skip
	fi;
	r[who].cached[0] = 1 + (inside -> agreed / BLOCK : hits);
	r[who].cached[1] = r[who].cached[0];
	r[who].partial = (inside -> 1 + agreed / BLOCK : 0)
}

inline allocate() {                      /* room for request who up to end */
	grown = r[who].cached[0] != 0;       /* whether it has allocated before */
	if
	:: grown -> skip
	:: else -> adopt()
	fi;
	if
	:: !grown && inside -> copy_for_writer(ATTENTION, agreed / BLOCK)
	:: else -> skip
	fi;
	do
	:: r[who].width[0] < up(end) -> take(); r[who].table[r[who].width[0]] = fresh; r[who].width[0]++
	:: else -> break
	od;
	if
	:: up(end) > r[who].width[1] || r[who].partial != 0 ->
		r[who].previous = r[who].width[1];
		r[who].width[1] = high(r[who].width[1], up(end) - 1);
		if
		:: r[who].partial != 0 && !grown -> copy_for_writer(RECURRENT, r[who].partial - 1)
		:: r[who].partial != 0 && grown ->     /* keyed inside itself, and written on: the key goes to a copy */
			source = r[who].table[COLUMNS + r[who].partial - 1];
			take();
			one = key[source * 2]; two = key[source * 2 + 1];
			forget(source);
#ifndef MUTANT_DROP
			register(fresh, one);
			made[one] = 1;
#endif
			if
			:: two != 0 -> register(fresh, two)
			:: else -> skip
			fi;
			ref[source]++;
			copy(RECURRENT)
		:: else -> skip
		fi;
		r[who].partial = 0;
		if
		:: r[who].width[1] < up(end) -> take(); r[who].table[COLUMNS + r[who].width[1]] = fresh; r[who].width[1]++
		:: else -> skip
		fi
	:: else -> skip
	fi
}

inline key_blocks() {                    /* everything complete among the first upto tokens of request who */
	upto = low(end, r[who].known);
	upto = (PARTIAL -> upto : down(upto));
	edge = low(upto, r[who].known / UNIT * UNIT) / BLOCK;
	tail = (prompt_of(r[who].prompt) - 1) / UNIT * UNIT;
	group = 0;
	do
	:: group < 2 ->
		count = r[who].cached[group] - 1;
		do
		:: count < edge ->
			block = r[who].table[group * COLUMNS + count];
			count++;
			if
			:: block != 0 && (group == ATTENTION || (tail / GRAIN * GRAIN) / BLOCK == count && tail > 0
			              || r[who].junction > 0 && (r[who].junction / GRAIN * GRAIN) / BLOCK == count) ->
				assert(noted(block) < count * BLOCK);
				forget(block);
				label = named(group, prefix(r[who].prompt, count * BLOCK));
				register(block, label);
				made[label] = 1
			:: else -> skip
			fi
		:: else -> break
		od;
		r[who].cached[group] = high(r[who].cached[group], edge + 1);
		group++
	:: else -> break
	od;
	if                                   /* attention: the last unit of a prompt, inside its block */
	:: PARTIAL && 0 < tail && tail <= upto && tail % BLOCK != 0 && tail / BLOCK < r[who].width[0] ->
		block = r[who].table[tail / BLOCK];
		key_inside(block, ATTENTION, tail)
	:: else -> skip
	fi;
	slot = up(upto) - 1;
	if                                   /* the state where the prompt can be resumed last: it must be copied then */
	:: upto > 0 && upto == tail && slot < r[who].width[1] && r[who].table[COLUMNS + slot] != 0 &&
	   noted(r[who].table[COLUMNS + slot]) != upto ->
		block = r[who].table[COLUMNS + slot];
		key_inside(block, RECURRENT, upto);
		if
		:: upto % BLOCK != 0 -> r[who].partial = slot + 1; r[who].cached[1] = slot + 1
		:: else -> skip
		fi
	:: else -> skip
	fi
}

inline take_all() {                      /* ok: there was room, and the blocks are there and keyed */
	retire();
	goal = end;
	charge();
	ok = !waits && cost <= queued;
	if
	:: ok -> allocate(); key_blocks(); r[who].from = start; r[who].upto = end; budget = budget - (end - start)
	:: else -> skip
	fi
}

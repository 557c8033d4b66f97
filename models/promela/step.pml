/* One step: who runs, copies, forwards, and what is sampled. Part of cache.pml. */

/* -- one step ------------------------------------------------------------------------------------------------------ */

inline schedule() {                      /* those that run, oldest first, then those that wait, until one can't enter */
	who = 0; more = false;
	do
	:: budget > 0 && who < here && (who < running || !more && running < RUNNING) ->
		enters = who >= running;
		hits = 0; state = 0; ok = true; start = r[who].computed;
		if
		:: enters -> lookup(); start = agreed
		:: else -> skip
		fi;
		offered = start + low(low(r[who].known - start, budget), (enters -> MODEL : MODEL - start - 1));
		cut();
		if
		:: enters && end > start ->      /* all of it must fit */
			goal = low(r[who].known, MODEL);
			charge();
#ifdef MUTANT_GATE
			cost = 0;
#endif
			ok = !waits && cost <= queued
		:: else -> skip
		fi;
		if
		:: ok && end > start -> take_all()
		:: else -> skip
		fi;
		if
		:: enters && (!ok || end <= start) -> break
		:: enters && ok && end > start -> running++; who++
		:: !enters && ok -> who++          /* it runs, or has nothing to run in this step */
		:: else ->                       /* the newest gives way, and nobody enters any more */
			more = true;
#ifdef MUTANT_OLDEST
			count = 0;
#else
			count = running - 1;
#endif
			preempt(count)
		fi
	:: else -> break
	od
}

inline run_copies() {                    /* in order of groups; then nobody counts on either end any more */
	count = 0;
	do
	:: count < copies ->
		kind_of[count] = kind[source_of[count]];
		block = 0;
		do
		:: block < BLOCK -> held_of[count * BLOCK + block] = held[source_of[count] * BLOCK + block]; block++
		:: else -> break
		od;
		count++
	:: else -> break
	od;
	count = 0;
	do
	:: count < copies ->
#ifndef MUTANT_COPY
		kind[target_of[count]] = kind_of[count];
		block = 0;
		do
		:: block < BLOCK -> held[target_of[count] * BLOCK + block] = held_of[count * BLOCK + block]; block++
		:: else -> break
		od;
#endif
		count++
	:: else -> break
	od;
	front = 0;
	group = 0;
	do
	:: group < 2 ->
		count = 0;
		do
		:: count < copies ->
			if
			:: group_of[count] == group ->
				given = source_of[count];
				release(given);
				given = target_of[count];
				release(given)
			:: else -> skip
			fi;
			count++
		:: else -> break
		od;
		group++
	:: else -> break
	od;
	copies = 0
}

inline compute() {                       /* rows read their own prefix, nothing else, and leave what comes after it */
	who = 0;
	do
	:: who < running ->
		if
		:: r[who].upto > 0 && r[who].from > 0 ->
			count = (r[who].column > 0 -> r[who].column - 1 : (r[who].from - 1) / BLOCK);
			block = r[who].table[COLUMNS + count];
			assert(block != 0 && kind[block] == STATE && held[block * BLOCK] == prefix(r[who].prompt, r[who].from));
			count = 0;
			do
			:: count < r[who].from ->
				block = r[who].table[count / BLOCK];
				assert(block != 0 && kind[block] == TOKENS);
				assert(held[block * BLOCK + count % BLOCK] == prefix(r[who].prompt, count + 1));
				count++
			:: else -> break
			od
		:: else -> skip
		fi;
		who++
	:: else -> break
	od;
	who = 0;
	do
	:: who < running ->
		if
		:: r[who].upto > 0 ->
			count = r[who].from;
			do
			:: count < r[who].upto ->
				block = r[who].table[count / BLOCK];
				assert(block != 0 && ref[block] == 1);
				if
				:: kind[block] == TOKENS -> skip
				:: else ->
					kind[block] = TOKENS;
					label = 0;
					do
					:: label < BLOCK -> held[block * BLOCK + label] = NOTHING; label++
					:: else -> break
					od
				fi;
				held[block * BLOCK + count % BLOCK] = prefix(r[who].prompt, count + 1);
				count++
			:: else -> break
			od;
			r[who].column = up(r[who].upto);
			block = r[who].table[COLUMNS + r[who].column - 1];
			assert(block != 0 && ref[block] == 1);
			kind[block] = STATE;
			label = 0;
			do
			:: label < BLOCK -> held[block * BLOCK + label] = 0; label++
			:: else -> break
			od;
			held[block * BLOCK] = prefix(r[who].prompt, r[who].upto);
			r[who].computed = r[who].upto;
			r[who].prefilling = r[who].upto < r[who].known
		:: else -> skip
		fi;
		who++
	:: else -> break
	od
}

inline sample() {                        /* whoever has computed all that is known puts out a token, and may be done */
	who = 0;
	do
	:: who < running ->
		end = r[who].upto;
		r[who].from = 0; r[who].upto = 0;
		if
		:: end > 0 && end >= r[who].known ->
			r[who].known++;
			if
			:: r[who].known - prompt_of(r[who].prompt) >= OUTPUTS || r[who].known >= MODEL -> remove(who)
			:: else -> who++
			fi
		:: else -> who++
		fi
	:: else -> break
	od
}

inline step() {
	budget = STEP; copies = 0;
	count = 0;
	do
	:: count < NAMES -> made[count] = 0; count++
	:: else -> break
	od;
	schedule();
	run_copies();
	compute();
	sample()
}

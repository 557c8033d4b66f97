/* Keys, references, the free queue, and who is there. Part of cache.pml. */

/* -- keys ------------------------------------------------------------------------------------------------------- */

inline forget(FB) {                      /* block FB loses its keys */
	nth = 0;
	do
	:: nth < 2 && key[FB * 2 + nth] != 0 ->
		spot = key[FB * 2 + nth] * FREE;
		do
		:: found[spot] != FB -> spot++
		:: else -> break
		od;
		do
		:: spot % FREE < FREE - 1 -> found[spot] = found[spot + 1]; spot++
		:: else -> break
		od;
		found[spot] = 0;
		key[FB * 2 + nth] = 0;
		nth++
	:: else -> break
	od
}

inline register(RB, RN) {                /* block RB can be found as RN */
	if
	:: key[RB * 2] == RN || key[RB * 2 + 1] == RN -> skip
	:: else ->
		assert(key[RB * 2 + 1] == 0);
		key[RB * 2 + (key[RB * 2] == 0 -> 0 : 1)] = RN;
		spot = RN * FREE;
		do
		:: found[spot] != 0 -> spot++
		:: else -> break
		od;
		found[spot] = RB
	fi
}

inline key_inside(IB, IG, IT) {          /* block IB is keyed as the first IT tokens of request who, inside itself */
	label = named(IG, prefix(r[who].prompt, IT));
	if
	:: IB != 0 && key[IB * 2] != label && key[IB * 2 + 1] != label ->
		made[label] = 1;
		if
		:: noted(IB) < IT -> forget(IB)
		:: else -> skip
		fi;
		register(IB, label)
	:: else -> skip
	fi
}

/* -- references and the free queue ------------------------------------------------------------------------------- */

inline take() {                          /* fresh: the first free block, without its keys */
	assert(queued > 0);
	fresh = queue[0];
	place = 0;
	do
	:: place < queued - 1 -> queue[place] = queue[place + 1]; place++
	:: else -> break
	od;
	queued--;
	queue[queued] = 0;
	forget(fresh);
	ref[fresh] = 1
}

inline touch(TB) {                       /* one more counts on block TB */
	if
	:: ref[TB] == 0 ->
		place = 0;
		do
		:: queue[place] != TB -> place++
		:: else -> break
		od;
		do
		:: place < queued - 1 -> queue[place] = queue[place + 1]; place++
		:: else -> break
		od;
		queued--;
		queue[queued] = 0
	:: else -> skip
	fi;
	ref[TB]++
}

inline release(LB) {                     /* one less; front: how many of its batch are at the queue's front already */
	assert(ref[LB] > 0);
	ref[LB]--;
	if
#ifdef MUTANT_FRONT
	:: ref[LB] == 0 && true ->
#else
	:: ref[LB] == 0 && key[LB * 2] == 0 ->
#endif
		place = queued;
		do
		:: place > front -> queue[place] = queue[place - 1]; place--
		:: else -> break
		od;
		queue[front] = LB;
		front++;
		queued++
#ifndef MUTANT_FRONT
	:: ref[LB] == 0 && key[LB * 2] != 0 -> queue[queued] = LB; queued++
#endif
	:: else -> skip
	fi
}

/* -- requests ---------------------------------------------------------------------------------------------------- */

inline move_request(MT, MF) {
	r[MT].prompt = r[MF].prompt; r[MT].known = r[MF].known; r[MT].computed = r[MF].computed;
	r[MT].junction = r[MF].junction; r[MT].preempted = r[MF].preempted; r[MT].prefilling = r[MF].prefilling;
	r[MT].retired = r[MF].retired; r[MT].previous = r[MF].previous; r[MT].column = r[MF].column;
	r[MT].cached[0] = r[MF].cached[0]; r[MT].cached[1] = r[MF].cached[1]; r[MT].partial = r[MF].partial;
	r[MT].width[0] = r[MF].width[0]; r[MT].width[1] = r[MF].width[1];
	r[MT].from = r[MF].from; r[MT].upto = r[MF].upto;
	place = 0;
	do
	:: place < 2 * COLUMNS -> r[MT].table[place] = r[MF].table[place]; place++
	:: else -> break
	od
}

inline strip(SI) {                       /* request SI lets everything go: by group, later columns first */
	group = 0;
	do
	:: group < 2 ->
		front = 0;
		do
		:: r[SI].width[group] > 0 ->
			r[SI].width[group]--;
			given = r[SI].table[group * COLUMNS + r[SI].width[group]];
			r[SI].table[group * COLUMNS + r[SI].width[group]] = 0;
			if
			:: given != 0 -> release(given)
			:: else -> skip
			fi
		:: else -> break
		od;
		r[SI].cached[group] = 0;
		group++
	:: else -> break
	od;
	r[SI].partial = 0; r[SI].retired = 0; r[SI].previous = 0; r[SI].column = 0;
	r[SI].computed = 0; r[SI].prefilling = 0
}

inline remove(GI) {                      /* request GI goes, the others move up */
	strip(GI);
	count = GI;
	if
	:: count < running -> running--
	:: else -> skip
	fi;
	do
	:: count < here -> move_request(count, count + 1); count++
	:: else -> break
	od;
	here--
}

inline submit(PI) {
	r[here].prompt = PI;
	r[here].known = prompt_of(PI);
	here++
}

inline preempt(PI) {                     /* running request PI waits again, first in line */
	strip(PI);
	r[PI].preempted = 1;
	move_request(REQUESTS, PI);
	count = PI;
	do
	:: count < running - 1 -> move_request(count, count + 1); count++
	:: else -> break
	od;
	move_request(count, REQUESTS);
	r[REQUESTS].prompt = 0; r[REQUESTS].known = 0; r[REQUESTS].junction = 0; r[REQUESTS].preempted = 0;
	r[REQUESTS].from = 0; r[REQUESTS].upto = 0;
	running--
}

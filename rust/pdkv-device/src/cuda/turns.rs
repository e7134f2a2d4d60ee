//! Who gets the next of a few things that many wait for. Decides from numbers alone.
//!
//! First come, first served, among those who may have one more. A holder may if it has none, or fewer than are free: alone it gets half of
//! all, and however many a holder keeps for good, there are as many left for the others, who share those in the same way.

use std::collections::{BTreeMap, VecDeque};

/// Whom something is for: all that one peer waits for and keeps counts as one holder's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder(pub u64);

/// A place in the queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u64);

#[derive(Debug)]
pub(super) struct Turns {
    free: usize,
    /// How many each holder has; those that have none are not in here.
    taken: BTreeMap<Holder, usize>,
    /// In the order in which they came.
    queue: VecDeque<(Place, Holder)>,
    next: u64,
}

impl Turns {
    /// For so many things, all of them free.
    pub(super) fn new(most: usize) -> Self {
        Self {
            free: most,
            taken: BTreeMap::new(),
            queue: VecDeque::new(),
            next: 0,
        }
    }

    /// Joins the queue.
    pub(super) fn join(&mut self, holder: Holder) -> Place {
        let place = Place(self.next);
        self.next += 1;
        self.queue.push_back((place, holder));
        place
    }

    /// Leaves the queue with nothing.
    pub(super) fn leave(&mut self, place: Place) {
        self.queue.retain(|(other, _)| *other != place);
    }

    /// Takes one if it is this one's turn, and leaves the queue.
    pub(super) fn take(&mut self, place: Place) -> bool {
        let turn = self.queue.iter().position(|(_, holder)| self.may(*holder));
        let Some((_, holder)) = turn
            .filter(|&at| self.queue[at].0 == place)
            .and_then(|at| self.queue.remove(at))
        else {
            return false;
        };
        self.free -= 1;
        *self.taken.entry(holder).or_default() += 1;
        true
    }

    /// Gives one back.
    pub(super) fn give_back(&mut self, holder: Holder) {
        self.free += 1;
        if let Some(taken) = self.taken.get_mut(&holder) {
            *taken -= 1;
            if *taken == 0 {
                self.taken.remove(&holder);
            }
        }
    }

    /// Whether anybody but this one waits.
    pub(super) fn others_wait(&self, holder: Holder) -> bool {
        self.queue.iter().any(|(_, of)| *of != holder)
    }

    fn may(&self, holder: Holder) -> bool {
        let has = self.taken.get(&holder).copied().unwrap_or(0);
        self.free > has || (self.free > 0 && has == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Holder = Holder(1);
    const B: Holder = Holder(2);
    const C: Holder = Holder(3);

    fn takes(turns: &mut Turns, holder: Holder) -> bool {
        let place = turns.join(holder);
        let took = turns.take(place);
        turns.leave(place);
        took
    }

    fn all_that_it_gets(turns: &mut Turns, holder: Holder) -> usize {
        std::iter::repeat_with(|| takes(turns, holder))
            .take_while(|took| *took)
            .count()
    }

    #[test]
    fn a_holder_that_gives_nothing_back_leaves_as_many_as_it_has() {
        for (most, parts) in [(1, [1, 0, 0]), (2, [1, 1, 0]), (4, [2, 1, 1]), (8, [4, 2, 1])] {
            let mut turns = Turns::new(most);
            let got = [A, B, C].map(|holder| all_that_it_gets(&mut turns, holder));
            assert_eq!(got, parts, "of {most}");
        }
    }

    #[test]
    fn who_came_first_is_served_first_whatever_the_others_ask() {
        let mut turns = Turns::new(1);
        assert!(takes(&mut turns, A));
        let [b, c, a] = [B, C, A].map(|holder| turns.join(holder));
        assert!(![b, c, a].into_iter().any(|place| turns.take(place)));
        turns.give_back(A);
        assert!(!turns.take(a) && !turns.take(c), "not its turn");
        assert!(turns.take(b));
        turns.give_back(B);
        assert!(!turns.take(a));
        // One that gives up does not hold up those behind it.
        turns.leave(c);
        assert!(turns.take(a));
        assert!(!turns.take(a), "once for each place");
    }

    #[test]
    fn nobody_is_another_to_himself() {
        let mut turns = Turns::new(1);
        assert!(takes(&mut turns, A) && !turns.others_wait(B));
        let own = turns.join(A);
        assert!(!turns.others_wait(A) && turns.others_wait(B));
        let place = turns.join(B);
        assert!(turns.others_wait(A) && turns.others_wait(B));
        turns.leave(own);
        turns.give_back(A);
        assert!(!turns.others_wait(B) && turns.take(place));
        assert!(!turns.others_wait(A));
    }

    #[test]
    fn who_has_its_part_is_passed_over_and_keeps_its_place() {
        let mut turns = Turns::new(2);
        assert!(takes(&mut turns, A));
        let more = turns.join(A);
        let b = turns.join(B);
        assert!(!turns.take(more));
        assert!(turns.take(b));
        let c = turns.join(C);
        turns.give_back(A);
        assert!(!turns.take(c) && turns.take(more), "first come, first served");
        turns.give_back(B);
        assert!(turns.take(c));
    }

    #[test]
    fn nobody_waits_for_ever_while_things_are_given_back() {
        for most in 1..5 {
            let mut turns = Turns::new(most);
            let mut held = VecDeque::new();
            // Two that always want more, and one that came in between.
            let mut waiting: Vec<_> = [A, A, B, C, B, A, B].map(|holder| (turns.join(holder), holder)).into();
            let c = waiting[3].0;
            for round in 0.. {
                assert!(round < 20, "of {most}");
                let mut served = waiting.clone();
                served.retain(|&(place, _)| turns.take(place));
                if served.iter().any(|(place, _)| *place == c) {
                    break;
                }
                waiting.retain(|entry| !served.contains(entry));
                for (_, holder) in served {
                    held.push_back(holder);
                    waiting.push((turns.join(holder), holder));
                }
                turns.give_back(held.pop_front().expect("somebody was served"));
            }
        }
    }
}

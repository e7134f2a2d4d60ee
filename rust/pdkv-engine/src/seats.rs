//! Who is answered at our local socket at this moment, who waits for that, and who is refused. Decides from what it is told alone.
//!
//! All that one process asks shares a part of the seats, whatever it holds them with: a slow answer, half a question, silence. The others find theirs free.
//! Within its part a process waits for its turn, up to a number of guests that nobody needs who means well.

use std::collections::{BTreeMap, VecDeque};

use pdkv_device::PeerCredentials;

/// Guests that are answered at once.
const MOST: usize = 64;
/// Of them those of one process.
const EACH: usize = 16;
/// Guests of one process that wait beyond those: as many as it may open data streams in one moment, and its questions.
const WAITING_EACH: usize = 96;
/// Guests that wait in all; each costs a descriptor here.
const WAITING: usize = 256;

/// What becomes of a guest that has come.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Come<T> {
    /// It has a seat.
    Seated(T),
    /// It is kept until there is one.
    Waits,
    /// There are too many of its process already, or of all.
    Refused(T),
}

#[derive(Debug)]
pub(crate) struct Seats<T> {
    /// By process; those that have none are not in here.
    taken: BTreeMap<PeerCredentials, usize>,
    /// In the order in which they came.
    waiting: VecDeque<(PeerCredentials, T)>,
}

impl<T> Default for Seats<T> {
    fn default() -> Self {
        Self {
            taken: BTreeMap::new(),
            waiting: VecDeque::new(),
        }
    }
}

impl<T> Seats<T> {
    /// Whether there is no seat for anybody: whoever comes now may as well wait where he is.
    pub(crate) fn is_full(&self) -> bool {
        self.taken.values().sum::<usize>() >= MOST
    }

    /// Whether anybody waits.
    pub(crate) fn any_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    fn may(&self, who: &PeerCredentials) -> bool {
        !self.is_full() && self.taken.get(who).is_none_or(|&taken| taken < EACH)
    }

    fn sit(&mut self, who: PeerCredentials) {
        *self.taken.entry(who).or_default() += 1;
    }

    /// Somebody has come.
    pub(crate) fn come(&mut self, who: PeerCredentials, guest: T) -> Come<T> {
        let before = self.waiting.iter().filter(|(of, _)| *of == who).count();
        if before == 0 && self.may(&who) {
            self.sit(who);
            return Come::Seated(guest);
        }
        if before >= WAITING_EACH || self.waiting.len() >= WAITING {
            return Come::Refused(guest);
        }
        self.waiting.push_back((who, guest));
        Come::Waits
    }

    /// The next of those that wait, who has a seat now.
    pub(crate) fn next(&mut self) -> Option<(PeerCredentials, T)> {
        let turn = self.waiting.iter().position(|(who, _)| self.may(who))?;
        let (who, guest) = self.waiting.remove(turn)?;
        self.sit(who);
        Some((who, guest))
    }

    /// Sends those that wait away, for nobody will be answered any more.
    pub(crate) fn dismiss(&mut self) {
        self.waiting.clear();
    }

    /// A seat is free again. Whether somebody may have waited for it, here or outside.
    pub(crate) fn leave(&mut self, who: PeerCredentials) -> bool {
        let wanted = self.is_full() || self.any_waits();
        if let Some(taken) = self.taken.get_mut(&who) {
            *taken -= 1;
            if *taken == 0 {
                self.taken.remove(&who);
            }
        }
        wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32) -> PeerCredentials {
        PeerCredentials { pid: Some(pid), uid: 7 }
    }

    #[test]
    fn a_process_that_keeps_what_it_has_leaves_seats_to_the_others() {
        let mut seats = Seats::default();
        let greedy = process(1);
        for number in 0..EACH {
            assert_eq!(seats.come(greedy, number), Come::Seated(number));
        }
        for number in 0..WAITING_EACH {
            assert_eq!(seats.come(greedy, number), Come::Waits);
        }
        assert_eq!(seats.come(greedy, 99), Come::Refused(99));
        assert!(!seats.is_full() && seats.next().is_none());
        assert_eq!(seats.come(process(2), 5), Come::Seated(5));
        // One that the kernel doesn't number here is one of them.
        let unseen = PeerCredentials { pid: None, uid: 7 };
        assert_eq!(seats.come(unseen, 6), Come::Seated(6));
        assert!(seats.leave(greedy));
        assert_eq!(seats.come(greedy, 7), Come::Refused(7), "others of its own came before");
        assert_eq!(seats.next(), Some((greedy, 0)));
        assert_eq!(seats.next(), None);
        assert_eq!(seats.come(greedy, 8), Come::Waits);
    }

    #[test]
    fn there_are_so_many_seats_and_those_that_wait_are_served_in_turn() {
        let mut seats = Seats::default();
        let all = (1..).map(process);
        for who in all.clone().take(MOST) {
            assert_eq!(seats.come(who, 0), Come::Seated(0));
        }
        assert!(seats.is_full());
        for (number, who) in all.skip(MOST).take(WAITING).enumerate() {
            assert_eq!(seats.come(who, number), Come::Waits);
        }
        assert_eq!(seats.come(process(9999), 1), Come::Refused(1));
        assert!(seats.next().is_none());
        for number in 0..2 {
            assert!(seats.leave(process(1 + number)), "somebody waits");
            let (who, first) = seats.next().unwrap();
            assert_eq!((who, first), (process(1 + MOST as u32 + number), number as usize));
        }
        assert!(seats.is_full() && seats.any_waits());
    }

    #[test]
    fn nobody_is_woken_for_a_seat_that_nobody_wants() {
        let mut seats = Seats::default();
        assert_eq!(seats.come(process(1), 0), Come::Seated(0));
        assert!(!seats.leave(process(1)) && !seats.any_waits());
        assert!(seats.taken.is_empty());
    }
}

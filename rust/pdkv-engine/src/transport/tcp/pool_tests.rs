//! The pool with hands that do what it says, and any others.

use super::*;
use proptest::prelude::*;
use std::cell::Cell;
use std::rc::Rc;

/// Somebody who wants a stream until told otherwise.
#[derive(Clone, Debug)]
struct Who(u32, Rc<Cell<bool>>);

impl Waiter for Who {
    fn wanted(&self) -> bool {
        self.1.get()
    }
}

#[derive(Clone, Copy, Debug)]
struct Stream {
    usable: bool,
}

impl Usable for Stream {
    fn is_usable(&self) -> bool {
        self.usable
    }
}

const GOOD: Stream = Stream { usable: true };

fn who(number: u32) -> Who {
    Who(number, Rc::new(Cell::new(true)))
}

/// A hand of a test, which does step by step what the pool says.
#[derive(Default)]
struct Hand {
    held: Option<Stream>,
}

type Tested = Pool<Stream, Who>;

impl Hand {
    fn step(&mut self, pool: &mut Tested, now: Instant) -> Next<Who> {
        pool.next(&mut self.held, &mut Vec::new(), now)
    }

    /// As far as to a piece of work, by a new stream where there is none.
    fn serve(&mut self, pool: &mut Tested, now: Instant) -> Place<Who> {
        loop {
            match self.step(pool, now) {
                Next::Serve(place) => return place,
                Next::Dial(_) => {
                    pool.dialed();
                    self.held = Some(GOOD);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn those_that_find_no_stream_are_served_in_turn_by_those_that_are_open() {
    let (mut pool, now) = (Pool::new(2, 1), Instant::now());
    for number in 0..5 {
        pool.join(who(number), now);
    }
    assert_eq!(pool.hire(now), 2, "as many as may be open");
    assert!(pool.needs_usher());
    let (mut one, mut two) = (Hand::default(), Hand::default());
    let order = [&mut one, &mut two].map(|hand| hand.serve(&mut pool, now).waiter.0);
    assert_eq!(order, [0, 1]);
    assert_eq!(pool.hire(now), 0);
    let order = [
        one.serve(&mut pool, now).waiter.0,
        one.serve(&mut pool, now).waiter.0,
        two.serve(&mut pool, now).waiter.0,
    ];
    assert_eq!(order, [2, 3, 4]);
    for hand in [&mut one, &mut two] {
        assert!(matches!(hand.step(&mut pool, now), Next::Over));
        assert!(hand.held.is_none());
    }
    assert_eq!(pool.idle.len(), 1, "the other is closed");
    assert!(!pool.is_attended());
}

#[test]
fn a_stream_that_rests_is_used_before_one_is_opened_and_not_when_its_owner_has_left() {
    let (mut pool, now) = (Pool::new(8, 8), Instant::now());
    pool.idle = vec![GOOD, Stream { usable: false }];
    pool.join(who(1), now);
    assert_eq!(pool.hire(now), 1);
    assert!(!pool.needs_usher());
    let mut hand = Hand::default();
    assert!(matches!(hand.step(&mut pool, now), Next::Serve(_)));
    assert!(pool.idle.is_empty());
}

#[test]
fn those_that_have_ended_leave_the_queue_wherever_they_are() {
    let (mut pool, now) = (Pool::<Stream, Who>::new(1, 1), Instant::now());
    let all: Vec<_> = (0..4).map(who).collect();
    for one in &all {
        pool.join(one.clone(), now);
    }
    assert_eq!(pool.hire(now), 1);
    let mut hand = Hand::default();
    assert_eq!(hand.serve(&mut pool, now).waiter.0, 0);
    all[2].1.set(false);
    assert_eq!(pool.sweep().iter().map(|who| who.0).collect::<Vec<_>>(), [2]);
    all[1].1.set(false);
    let mut gone = Vec::new();
    let next = pool.next(&mut hand.held, &mut gone, now);
    assert!(matches!(next, Next::Serve(place) if place.waiter.0 == 3));
    assert_eq!(gone.iter().map(|who| who.0).collect::<Vec<_>>(), [1]);
}

#[test]
fn what_the_owner_does_not_take_is_served_by_what_it_took() {
    let (mut pool, now) = (Pool::new(8, 8), Instant::now());
    for number in 0..3 {
        pool.join(who(number), now);
    }
    assert_eq!(pool.hire(now), 3);
    let mut one = Hand::default();
    assert_eq!(one.serve(&mut pool, now).waiter.0, 0);
    let mut two = Hand::default();
    let Next::Dial(before) = two.step(&mut pool, now) else {
        panic!()
    };
    assert!(pool.not_dialed(before, true, now).is_empty());
    // Not even those that have waited for long: there is a stream.
    let late = now + PATIENCE * 2;
    let mut three = Hand::default();
    let Next::Dial(before) = three.step(&mut pool, late) else {
        panic!()
    };
    assert!(pool.not_dialed(before, true, late).is_empty());
    // Nobody looks after them yet, so the hand stays until somebody does.
    assert!(matches!(two.step(&mut pool, late), Next::Look));
    pool.ushered = true;
    assert!(matches!(two.step(&mut pool, late), Next::Over));
    assert!(matches!(three.step(&mut pool, late), Next::Over));
    assert_eq!(pool.hire(late), 0, "not at once again");
    assert_eq!(pool.hire(late + PAUSE), 2);
    assert_eq!(one.serve(&mut pool, late).waiter.0, 1);
}

#[test]
fn where_there_is_no_stream_at_all_those_fail_who_waited_for_it() {
    let (mut pool, now) = (Pool::new(8, 8), Instant::now());
    pool.join(who(0), now);
    assert_eq!(pool.hire(now), 1);
    let mut hand = Hand::default();
    let Next::Dial(before) = hand.step(&mut pool, now) else {
        panic!()
    };
    pool.join(who(1), now);
    let vain = pool.not_dialed(before, false, now);
    assert_eq!(vain.iter().map(|who| who.0).collect::<Vec<_>>(), [0]);
    let Next::Dial(before) = hand.step(&mut pool, now) else {
        panic!()
    };
    assert!(pool.not_dialed(before, true, now).is_empty(), "it may have room soon");
    let late = now + PATIENCE;
    let Next::Dial(before) = hand.step(&mut pool, late) else {
        panic!()
    };
    assert_eq!(pool.not_dialed(before, true, late).len(), 1, "and not for ever");
}

#[test]
fn patience_with_an_owner_that_takes_no_stream_begins_when_there_is_none() {
    let (mut pool, start) = (Pool::new(8, 8), Instant::now());
    for number in 0..2 {
        pool.join(who(number), start);
    }
    assert_eq!(pool.hire(start), 2);
    // Both wait for long behind a stream that is there.
    let (mut one, mut two) = (Hand::default(), Hand::default());
    let served = one.serve(&mut pool, start);
    let Next::Dial(before) = two.step(&mut pool, start) else {
        panic!()
    };
    assert!(pool.not_dialed(before, true, start).is_empty());
    let mut now = start + PATIENCE * 10;
    // Then it breaks, and what it served begins anew.
    assert!(!pool.lost());
    pool.rejoin(served, false, now);
    let mut refused = |pool: &mut Pool<Stream, Who>, now| {
        let Next::Dial(before) = two.step(pool, now) else {
            panic!()
        };
        pool.not_dialed(before, true, now).len()
    };
    assert_eq!(refused(&mut pool, now), 0, "it may have room soon");
    now += PATIENCE / 2;
    pool.join(who(2), now);
    assert_eq!(refused(&mut pool, now), 0);
    now += PATIENCE / 2;
    assert_eq!(refused(&mut pool, now), 2, "those that were there");
    now += PATIENCE / 2;
    assert_eq!(refused(&mut pool, now), 1, "and who came later");
}

#[test]
fn hands_that_dial_beside_one_another_are_no_streams() {
    let (mut pool, start) = (Pool::new(8, 8), Instant::now());
    for number in 0..2 {
        pool.join(who(number), start);
    }
    assert_eq!(pool.hire(start), 2);
    let mut hands = [Hand::default(), Hand::default()];
    let mut dial = |pool: &mut Pool<Stream, Who>, hand: usize, now| match hands[hand].step(pool, now) {
        Next::Dial(before) => before,
        other => panic!("{other:?}"),
    };
    let (one, two) = (dial(&mut pool, 0, start), dial(&mut pool, 1, start));
    assert!(pool.not_dialed(one, true, start).is_empty());
    // The first dials again before the second has its answer, and so on.
    let half = start + PATIENCE / 2;
    let one = dial(&mut pool, 0, half);
    assert!(pool.not_dialed(two, true, half).is_empty());
    let end = start + PATIENCE;
    dial(&mut pool, 1, end);
    assert!(pool.not_dialed(one, true, end).is_empty(), "the other may get one");
    assert_eq!(
        pool.not_dialed(two, true, end).len(),
        2,
        "both have waited for long enough"
    );
}

#[test]
fn a_pool_that_is_closed_gives_nobody_anything() {
    let (mut pool, now) = (Pool::new(8, 8), Instant::now());
    pool.idle = vec![GOOD];
    pool.join(who(0), now);
    assert_eq!(pool.close().len(), 1);
    assert!(pool.is_over());
    assert_eq!(pool.hire(now), 1, "who lets it go");
    let mut gone = Vec::new();
    // Not even the stream that it held is kept.
    pool.holding = 1;
    assert!(matches!(pool.next(&mut Some(GOOD), &mut gone, now), Next::Over));
    assert_eq!(gone.len(), 1);
    assert!(pool.idle.is_empty());
}

proptest! {
    /// Whatever owners and waiters do: never more streams than may be open, and everybody gets out.
    #[test]
    fn nobody_is_forgotten(script in proptest::collection::vec((0_u8..8, any::<u8>()), 1..400), most in 1_usize..5) {
        let mut now = Instant::now();
        let mut pool = Pool::new(most, 2);
        let (mut all, mut hands): (Vec<Who>, Vec<Hand>) = (Vec::new(), Vec::new());
        let (mut dialing, mut serving) = (Vec::new(), Vec::new());
        let mut gone = Vec::new();
        let settle = 20 * script.len();
        let script = script.into_iter().map(Some).chain(std::iter::repeat_n(None, settle));
        for step in script {
            now += Duration::from_millis(30);
            // In the end all goes well, and somebody looks after those that are left.
            let (what, pick) = step.unwrap_or((4, 0));
            let pick = usize::from(pick);
            match what {
                0 => {
                    let one = who(all.len() as u32);
                    all.push(one.clone());
                    pool.join(one, now);
                }
                1 if !all.is_empty() => all[pick % all.len()].1.set(false),
                2 if !dialing.is_empty() => {
                    let (hand, before) = dialing.swap_remove(pick % dialing.len());
                    gone.extend(pool.not_dialed(before, pick % 2 == 0, now));
                    hands.push(hand);
                }
                3 if !serving.is_empty() => {
                    // Its stream breaks.
                    let (mut hand, place): (Hand, Place<Who>) = serving.swap_remove(pick % serving.len());
                    hand.held = None;
                    pool.lost();
                    pool.rejoin(place, pick % 2 == 0, now);
                    hands.push(hand);
                }
                _ => {
                    pool.ushered = true;
                    gone.extend(pool.sweep());
                    pool.ushered = !pool.is_empty();
                    if !dialing.is_empty() {
                        let (mut hand, _): (Hand, u64) = dialing.remove(0);
                        pool.dialed();
                        hand.held = Some(GOOD);
                        hands.push(hand);
                    }
                    if !serving.is_empty() {
                        let (hand, place): (Hand, Place<Who>) = serving.remove(0);
                        place.waiter.1.set(false);
                        gone.push(place.waiter);
                        hands.push(hand);
                    }
                }
            }
            hands.extend((0..pool.hire(now)).map(|_| Hand::default()));
            for mut hand in std::mem::take(&mut hands) {
                match pool.next(&mut hand.held, &mut gone, now) {
                    Next::Serve(place) => serving.push((hand, place)),
                    Next::Dial(before) => dialing.push((hand, before)),
                    Next::Look => hands.push(hand),
                    Next::Over => {}
                }
            }
            let busy = serving.len() + dialing.len() + hands.iter().filter(|hand| hand.held.is_some()).count();
            prop_assert!(busy + pool.idle.len() <= most);
        }
        prop_assert!(pool.is_empty() && serving.is_empty());
        prop_assert_eq!(gone.len(), all.len());
        prop_assert!(!pool.is_attended() && hands.is_empty() && dialing.is_empty());
    }
}

//! The circle in which entries stand: first in, first out, with a head that moves. It knows no tokens.
//!
//! Every place has a label, so that two places are compared in constant time; where labels run out, those around are
//! spread anew (Bender et al., "Two simplified algorithms for maintaining order in a list"), which costs O(log n)
//! writes for each insertion in the long run. Labels never change who stands before whom.

/// Index of a place.
pub(super) type Slot = u32;

/// Labels are below this.
const SPAN: u64 = 1 << 62;
/// The distance to the last label at which the next is put where there is room.
const STEP: u64 = 1 << 20;
/// One, with 32 binary digits behind the point.
const ONE: u64 = 1 << 32;

#[derive(Clone, Debug)]
struct Place {
    label: u64,
    prev: Slot,
    next: Slot,
    /// Taken, but not gone for good: it keeps its place and is not seen.
    out: bool,
    generation: u32,
}

/// Places in a circle.
#[derive(Clone, Debug, Default)]
pub(super) struct Order {
    places: Vec<Place>,
    free: Vec<Slot>,
    /// The order begins directly before this place.
    head: Option<Slot>,
    /// The place with the smallest label.
    first: Slot,
}

impl Order {
    /// The label of a place.
    pub(super) fn label(&self, slot: Slot) -> u64 {
        self.places[slot as usize].label
    }

    /// The label at which the order begins.
    pub(super) fn start(&self) -> u64 {
        self.head.map_or(0, |head| self.label(head))
    }

    /// How far behind the head a label stands: smaller is earlier in the order.
    pub(super) fn distance(&self, slot: Slot) -> u64 {
        self.label(slot).wrapping_sub(self.start())
    }

    /// How often the slot was used before.
    pub(super) fn generation(&self, slot: Slot) -> u32 {
        self.places[slot as usize].generation
    }

    /// Makes a place at the end of the order, before those that were taken from its end: they would stand at its
    /// front again if they came back.
    pub(super) fn push(&mut self) -> Slot {
        let Some(head) = self.head else {
            let slot = self.allot(0);
            self.link(slot, slot, slot);
            self.first = slot;
            self.head = Some(slot);
            return slot;
        };
        let mut before = head;
        loop {
            let prev = self.places[before as usize].prev;
            if !self.places[prev as usize].out {
                break;
            }
            before = prev;
            if before == head {
                // All are out: the new one stands alone.
                let slot = self.insert_before(head);
                self.head = Some(slot);
                return slot;
            }
        }
        self.insert_before(before)
    }

    /// Takes a place out of sight. The order now begins after it.
    pub(super) fn take(&mut self, slot: Slot) {
        let place = &mut self.places[slot as usize];
        place.out = true;
        self.head = Some(place.next);
    }

    /// Makes a taken place seen again. It is the first in the order if nothing seen stands between it and the head.
    pub(super) fn put_back(&mut self, slot: Slot) {
        let Some(head) = self.head else { return };
        self.places[slot as usize].out = false;
        let mut at = self.places[slot as usize].next;
        while at != head {
            if !self.places[at as usize].out {
                return;
            }
            at = self.places[at as usize].next;
        }
        self.head = Some(slot);
    }

    /// Whether the place was taken and not put back.
    pub(super) fn is_out(&self, slot: Slot) -> bool {
        self.places[slot as usize].out
    }

    /// Removes a place for good.
    pub(super) fn remove(&mut self, slot: Slot) {
        let place = &mut self.places[slot as usize];
        place.generation = place.generation.wrapping_add(1);
        let (prev, next) = (place.prev, place.next);
        self.free.push(slot);
        if next == slot {
            self.head = None;
            return;
        }
        self.places[prev as usize].next = next;
        self.places[next as usize].prev = prev;
        if self.first == slot {
            self.first = next;
        }
        if self.head == Some(slot) {
            self.head = Some(next);
        }
    }

    fn insert_before(&mut self, next: Slot) -> Slot {
        let prev = self.places[next as usize].prev;
        let mut gap = self.gap(prev, next);
        if gap < 2 {
            self.spread(prev);
            gap = self.gap(prev, next);
        }
        // In front of the first is behind the last: the circle is cut there.
        let room = if next == self.first { STEP.min(gap / 2) } else { gap / 2 };
        let slot = self.allot(self.label(prev) + room);
        self.link(slot, prev, next);
        slot
    }

    fn gap(&self, prev: Slot, next: Slot) -> u64 {
        let end = if next == self.first { SPAN } else { self.label(next) };
        end - self.label(prev)
    }

    fn allot(&mut self, label: u64) -> Slot {
        if let Some(slot) = self.free.pop() {
            let place = &mut self.places[slot as usize];
            place.label = label;
            place.out = false;
            return slot;
        }
        let slot = self.places.len() as Slot;
        self.places.push(Place {
            label,
            prev: slot,
            next: slot,
            out: false,
            generation: 0,
        });
        slot
    }

    fn link(&mut self, slot: Slot, prev: Slot, next: Slot) {
        self.places[slot as usize].prev = prev;
        self.places[slot as usize].next = next;
        self.places[prev as usize].next = slot;
        self.places[next as usize].prev = slot;
    }

    /// Spreads the labels around a place evenly over the smallest aligned range that is not crowded.
    fn spread(&mut self, around: Slot) {
        let label = self.label(around);
        let (mut left, mut right, mut count) = (around, around, 1_u64);
        let mut room = ONE;
        for bits in 1..=SPAN.ilog2() {
            let size = 1_u64 << bits;
            let base = label & !(size - 1);
            while left != self.first && self.label(self.places[left as usize].prev) >= base {
                left = self.places[left as usize].prev;
                count += 1;
            }
            while self.places[right as usize].next != self.first
                && self.label(self.places[right as usize].next) < base + size
            {
                right = self.places[right as usize].next;
                count += 1;
            }
            // A range of 2^bits takes (4/3)^bits labels; the whole span takes what comes.
            room += room / 3;
            if bits >= 2 && (count * ONE <= room || size == SPAN) {
                let step = size / count;
                let mut at = left;
                for index in 0..count {
                    self.places[at as usize].label = base + index * step;
                    at = self.places[at as usize].next;
                }
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(order: &Order) -> Vec<Slot> {
        let Some(head) = order.head else { return Vec::new() };
        let mut found = Vec::new();
        let mut at = head;
        loop {
            if !order.is_out(at) {
                found.push(at);
            }
            at = order.places[at as usize].next;
            if at == head {
                return found;
            }
        }
    }

    fn ascending(order: &Order) {
        let mut at = order.first;
        loop {
            let next = order.places[at as usize].next;
            if next == order.first {
                return;
            }
            assert!(order.label(at) < order.label(next));
            at = next;
        }
    }

    #[test]
    fn what_was_taken_from_the_front_comes_back_to_the_front() {
        let mut order = Order::default();
        let places: Vec<Slot> = (0..3).map(|_| order.push()).collect();
        order.take(places[0]);
        order.take(places[1]);
        let new = order.push();
        assert_eq!(seen(&order), [places[2], new]);
        order.put_back(places[1]);
        order.put_back(places[0]);
        assert_eq!(seen(&order), [places[0], places[1], places[2], new]);
    }

    #[test]
    fn a_place_that_comes_back_to_a_circle_of_absent_ones_is_the_first() {
        let mut order = Order::default();
        let places: Vec<Slot> = (0..3).map(|_| order.push()).collect();
        for &place in &places {
            order.take(place);
        }
        let new = order.push();
        assert_eq!(seen(&order), [new]);
        for &place in places.iter().rev() {
            order.put_back(place);
        }
        assert_eq!(seen(&order), [places[0], places[1], places[2], new]);
    }

    #[test]
    fn one_gap_takes_any_number() {
        let mut order = Order::default();
        let places: Vec<Slot> = (0..64).map(|_| order.push()).collect();
        order.take(places[31]);
        order.remove(places[31]);
        for _ in 0..20_000 {
            order.push();
        }
        ascending(&order);
        let found = seen(&order);
        assert_eq!((found[0], found.len()), (places[32], 20_063));
        assert!(found[63..].is_sorted(), "new ones stand behind one another");
    }

    #[test]
    fn a_gap_within_a_gap_within_a_gap_is_found() {
        let mut order = Order::default();
        for _ in 0..3 {
            order.push();
        }
        for _ in 0..3_000 {
            // Between the newest two, again and again.
            let found = seen(&order);
            let last = found[found.len() - 1];
            let prev = order.places[last as usize].prev;
            order.take(prev);
            order.put_back(prev);
            order.head = Some(last);
            order.push();
            order.push();
        }
        ascending(&order);
        assert_eq!(seen(&order).len(), 6_003);
    }
}

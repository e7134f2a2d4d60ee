//! The index against a list that is scanned, and against the queue that the order imitates.

use std::collections::VecDeque;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// What is asked for; numbers choose among what is there.
#[derive(Clone, Debug)]
enum Step {
    Insert(Vec<i64>),
    Take(Vec<i64>, bool),
    TakeFront,
    PutBack(usize),
    Remove(usize),
    RemoveTaken(usize),
}

fn tokens() -> impl Strategy<Value = Vec<i64>> {
    let few = vec(0_i64..3, 0..7);
    let long = (0_i64..40, 0_i64..2).prop_map(|(len, odd)| (0..len).map(|at| at / 20 * odd).collect());
    prop_oneof![3 => few, 1 => long]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => tokens().prop_map(Step::Insert),
        4 => (tokens(), any::<bool>()).prop_map(|(tokens, longest)| Step::Take(tokens, longest)),
        1 => Just(Step::TakeFront),
        2 => any::<usize>().prop_map(Step::PutBack),
        1 => any::<usize>().prop_map(Step::Remove),
        2 => any::<usize>().prop_map(Step::RemoveTaken),
    ];
    vec(step, 0..120)
}

/// How many tokens agree if one is a prefix of the other and neither is empty.
fn score(one: &[i64], other: &[i64]) -> usize {
    let shared = one.len().min(other.len());
    if one[..shared] == other[..shared] { shared } else { 0 }
}

/// The rules word by word: a list that begins where the order begins.
#[derive(Default)]
struct Naive(Vec<(EntryId, Vec<i64>, bool)>);

impl Naive {
    fn insert(&mut self, id: EntryId, tokens: Vec<i64>) {
        let end = self.0.iter().rposition(|(_, _, out)| !out).map_or(0, |at| at + 1);
        self.0.insert(end, (id, tokens, false));
    }

    fn find(&self, tokens: &[i64], how: Match) -> Option<Found> {
        let scores = self.0.iter().filter(|(_, _, out)| !out);
        let scores = scores.map(|(id, theirs, _)| (*id, score(theirs, tokens)));
        let most = match how {
            Match::Either => 1,
            Match::LongestPrefix => scores.clone().map(|(_, score)| score).max()?.max(1),
        };
        let (entry, matched) = scores.into_iter().find(|&(_, score)| score >= most)?;
        Some(Found { entry, matched })
    }

    fn at(&self, id: EntryId) -> usize {
        self.0.iter().position(|entry| entry.0 == id).unwrap()
    }

    fn take(&mut self, id: EntryId) {
        let at = self.at(id);
        self.0[at].2 = true;
        self.0.rotate_left(at + 1);
    }

    fn put_back(&mut self, id: EntryId) {
        let at = self.at(id);
        self.0[at].2 = false;
        if self.0[at + 1..].iter().all(|(_, _, out)| *out) {
            self.0.rotate_left(at);
        }
    }

    fn ids(&self, out: bool) -> Vec<EntryId> {
        self.0
            .iter()
            .filter(|entry| entry.2 == out)
            .map(|entry| entry.0)
            .collect()
    }
}

fn chosen(from: &[EntryId], number: usize) -> Option<EntryId> {
    (!from.is_empty()).then(|| from[number % from.len()])
}

fn how(longest: bool) -> Match {
    if longest { Match::LongestPrefix } else { Match::Either }
}

proptest! {
    #[test]
    fn it_is_a_list_that_is_scanned(steps in steps(), probes in vec(tokens(), 8)) {
        let (mut index, mut naive) = (LookupIndex::default(), Naive::default());
        let mut seen = std::collections::BTreeSet::new();
        for step in steps {
            match step {
                Step::Insert(tokens) => {
                    let id = index.insert(&tokens);
                    prop_assert!(seen.insert(id), "an id came twice");
                    naive.insert(id, tokens);
                }
                Step::Take(tokens, longest) => {
                    let found = index.find(&tokens, how(longest));
                    prop_assert_eq!(found, naive.find(&tokens, how(longest)));
                    if let Some(found) = found {
                        index.take(found.entry).unwrap();
                        naive.take(found.entry);
                    }
                }
                Step::TakeFront => {
                    let front = index.front();
                    prop_assert_eq!(front, naive.ids(false).first().copied());
                    if let Some(front) = front {
                        index.take(front).unwrap();
                        naive.take(front);
                    }
                }
                Step::PutBack(number) => {
                    if let Some(id) = chosen(&naive.ids(true), number) {
                        index.put_back(id).unwrap();
                        naive.put_back(id);
                    }
                }
                Step::Remove(number) => {
                    if let Some(id) = chosen(&naive.ids(false), number) {
                        index.remove(id).unwrap();
                        naive.0.remove(naive.at(id));
                        prop_assert!(index.remove(id).is_err());
                    }
                }
                Step::RemoveTaken(number) => {
                    if let Some(id) = chosen(&naive.ids(true), number) {
                        index.remove(id).unwrap();
                        naive.0.remove(naive.at(id));
                        prop_assert!(index.put_back(id).is_err());
                    }
                }
            }
            prop_assert_eq!(index.entries(), naive.ids(false));
            prop_assert_eq!(index.len(), naive.ids(false).len());
        }
        for probe in probes {
            for longest in [false, true] {
                prop_assert_eq!(index.find(&probe, how(longest)), naive.find(&probe, how(longest)));
            }
        }
        for (id, _, _) in std::mem::take(&mut naive.0) {
            index.remove(id).unwrap();
        }
        prop_assert!(index.is_empty());
        prop_assert_eq!(index.tree.len(), 1, "only the root is left");
    }

    /// What is inserted and taken for good stands as in a queue that is rotated by one for each entry passed over.
    #[test]
    fn it_is_a_queue_that_is_rotated(steps in steps()) {
        let mut index = LookupIndex::default();
        let mut queue: VecDeque<(EntryId, Vec<i64>)> = VecDeque::new();
        for step in steps {
            let wanted = match step {
                Step::Insert(tokens) => {
                    let id = index.insert(&tokens);
                    queue.push_back((id, tokens));
                    continue;
                }
                Step::Take(tokens, _) => Some(tokens),
                _ => None,
            };
            let mut hit = None;
            for _ in 0..queue.len() {
                if wanted.as_ref().is_none_or(|tokens| score(&queue[0].1, tokens) > 0) {
                    hit = queue.pop_front().map(|(id, _)| id);
                    break;
                }
                queue.rotate_left(1);
            }
            let found = wanted.map_or_else(
                || index.front(),
                |tokens| index.find(&tokens, Match::Either).map(|found| found.entry),
            );
            prop_assert_eq!(found, hit);
            if let Some(id) = found {
                index.take(id).unwrap();
                index.remove(id).unwrap();
            }
            prop_assert_eq!(index.entries(), queue.iter().map(|(id, _)| *id).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_hit_leaves_those_before_it_behind_the_newest() {
    let mut index = LookupIndex::default();
    let ids: Vec<EntryId> = (1..=4).map(|token| index.insert(&[token])).collect();
    let found = index.find(&[3, 9], Match::Either).unwrap();
    assert_eq!((found.entry, found.matched), (ids[2], 1));
    index.take(found.entry).unwrap();
    let new = index.insert(&[5]);
    assert_eq!(index.entries(), [ids[3], ids[0], ids[1], new]);
}

#[test]
fn no_tokens_match_nothing() {
    let mut index = LookupIndex::default();
    let bare = index.insert(&[]);
    let entry = index.insert(&[7]);
    assert_eq!(index.find(&[], Match::Either), None);
    assert_eq!(index.find(&[7, 8], Match::LongestPrefix).unwrap().entry, entry);
    assert_eq!(index.front(), Some(bare));
}

#[test]
fn unknown_and_doubly_taken_entries_are_refused() {
    let mut index = LookupIndex::default();
    let entry = index.insert(&[1]);
    assert!(index.put_back(entry).is_err());
    index.take(entry).unwrap();
    assert!(index.take(entry).is_err());
    assert!(index.remove(EntryId(99)).is_err());
    index.remove(entry).unwrap();
    let heir = index.insert(&[1]);
    assert_ne!(heir, entry);
    let error = index.take(entry).unwrap_err();
    assert!(error.message().contains(&entry.0.to_string()), "{error}");
}

#[test]
fn nested_prefixes_are_found_at_every_depth() {
    let mut index = LookupIndex::default();
    let long: Vec<i64> = (0..600).collect();
    let ids: Vec<EntryId> = (1..=600).map(|len| index.insert(&long[..len])).collect();
    for len in [1, 2, 299, 600] {
        let found = index.find(&long[..len], Match::LongestPrefix).unwrap();
        assert_eq!((found.entry, found.matched), (ids[len - 1], len));
        assert_eq!(index.find(&long[..len], Match::Either).unwrap().entry, ids[0]);
    }
    for &id in ids.iter().rev() {
        index.remove(id).unwrap();
    }
    assert_eq!(index.tree.len(), 1);
}

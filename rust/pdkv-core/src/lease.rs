//! Deadlines in order of time, not of arrival: leases, claims, transfers and heartbeats of one engine.
//!
//! One queue serves everything that can run out. Re-arming moves an entry, so a renewed lease never
//! hides an expired one behind it, and nothing waits for traffic to be noticed.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

/// Time since the engine started, monotonic. Never a wall clock.
pub type Now = Duration;

/// A set of armed timers, each key at most once.
#[derive(Clone, Debug)]
pub struct Deadlines<K> {
    ordered: BTreeSet<(Now, K)>,
    armed: BTreeMap<K, Now>,
}

impl<K: Ord + Copy> Default for Deadlines<K> {
    fn default() -> Self {
        Self {
            ordered: BTreeSet::new(),
            armed: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Copy> Deadlines<K> {
    /// Arms `key` for `at`, wherever it was before.
    pub fn arm(&mut self, key: K, at: Now) {
        if let Some(before) = self.armed.insert(key, at) {
            self.ordered.remove(&(before, key));
        }
        self.ordered.insert((at, key));
    }

    /// Disarms `key`; nothing happens if it was not armed.
    pub fn disarm(&mut self, key: K) {
        if let Some(at) = self.armed.remove(&key) {
            self.ordered.remove(&(at, key));
        }
    }

    /// When `key` is due.
    pub fn at(&self, key: K) -> Option<Now> {
        self.armed.get(&key).copied()
    }

    /// The earliest deadline.
    pub fn next(&self) -> Option<Now> {
        self.ordered.first().map(|&(at, _)| at)
    }

    /// Takes one key whose time has come, earliest first.
    pub fn pop_due(&mut self, now: Now) -> Option<K> {
        let &(at, key) = self.ordered.first()?;
        if at > now {
            return None;
        }
        self.ordered.pop_first();
        self.armed.remove(&key);
        Some(key)
    }

    /// Number of armed timers.
    pub fn len(&self) -> usize {
        self.armed.len()
    }

    /// Whether nothing is armed.
    pub fn is_empty(&self) -> bool {
        self.armed.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_renewed_lease_does_not_shield_an_expired_one() {
        let mut deadlines = Deadlines::default();
        deadlines.arm("renewed", S);
        deadlines.arm("expired", S * 2);
        deadlines.arm("renewed", S * 9);
        assert_eq!(deadlines.next(), Some(S * 2));
        assert_eq!(deadlines.pop_due(S * 3), Some("expired"));
        assert_eq!(deadlines.pop_due(S * 3), None);
        assert_eq!(deadlines.at("renewed"), Some(S * 9));
        deadlines.disarm("renewed");
        assert!(deadlines.is_empty() && deadlines.next().is_none());
    }
}

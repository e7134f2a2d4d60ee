//! The wall between UCX's callbacks and our code: whatever panics in a callback stops there.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

static PANICS: AtomicU64 = AtomicU64::new(0);

/// Runs the body of a callback; a panic is counted and `fallback` returned in its place.
pub(crate) fn callback<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(payload) => {
            PANICS.fetch_add(1, Ordering::Relaxed);
            // Dropping the payload may panic again; it is leaked instead.
            std::mem::forget(payload);
            fallback
        }
    }
}

/// How many callbacks panicked since the process started; anything but 0 is a bug of ours.
pub fn callback_panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_at_the_wall() {
        let before = callback_panics();
        assert_eq!(callback(7, || 5), 5);
        assert_eq!(callback(7, || panic!("this panic is part of the test")), 7);
        assert_eq!(callback_panics(), before + 1);
    }
}

//! What a failure of the driver says: about what it was asked before, whether that may still be running; and about the next time, whether it will say
//! the same.

use pdkv_core::{Error, ErrorKind};

/// Whether an error means that its context is dead: nothing that was asked in it runs any more, and nothing will.
///
/// Others do not stop the device. A graph that is captured (900 and on), a missing context (201) or a wrong argument (1) make a call fail that would have
/// told, or waited; what is under way goes on.
pub(super) fn is_dead(error: &Error) -> bool {
    let status = status(error);
    // A driver that is gone (4), a device that is (46, 999) or its server (810), memory and links beyond repair, contained or not (214, 220, 226),
    // then what kernels do wrong: addresses, timeouts, traps, assertions; and a context that was destroyed (709).
    status.is_some_and(|status| {
        matches!(
            status,
            4 | 46 | 214 | 220 | 226 | 700 | 702 | 709 | 710 | 714..=719 | 721 | 810 | 999
        )
    })
}

fn status(error: &Error) -> Option<u32> {
    let (_, value) = error.context().iter().find(|(key, _)| *key == "status")?;
    value.parse().ok()
}

/// Whether asking again would bring the same answer, as far as the kind of an error says.
pub(super) fn lasts(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Region)
}

/// The error of a call that names memory or opens it to somebody: `Unsupported` where the driver speaks of the memory or of the device, and would say
/// the same again. Anything else may be of the moment, and stays what it is.
pub(super) fn judged(error: Error) -> Error {
    // A wrong argument or handle, a missing device, no peer access, not permitted, not supported.
    if !matches!(status(&error), Some(1 | 101 | 217 | 400 | 800 | 801)) {
        return error;
    }
    let kept = Error::new(ErrorKind::Unsupported, error.operation(), error.message());
    match error.hint() {
        Some(hint) => kept.with_hint(hint),
        None => kept,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_dead_context_says_that_nothing_runs() {
        let error = |status: u32| Error::new(ErrorKind::Device, "test", "words").with("status", status);
        assert!(
            [4, 46, 214, 226, 700, 702, 709, 710, 719, 721, 810, 999]
                .map(error)
                .iter()
                .all(is_dead)
        );
        assert!(
            ![1, 201, 600, 701, 708, 712, 713, 900, 901]
                .map(error)
                .iter()
                .any(is_dead)
        );
        assert!(!is_dead(&Error::new(ErrorKind::Device, "test", "`719`")));
    }

    #[test]
    fn what_the_driver_says_of_memory_lasts_and_what_it_says_of_the_moment_does_not() {
        let error = |status: u32| judged(Error::new(ErrorKind::Device, "test", "words").with("status", status));
        assert!([1, 101, 217, 400, 800, 801].map(error).iter().all(lasts));
        assert!(![2, 4, 46, 201, 700, 719, 900, 999].map(error).iter().any(lasts));
        assert_eq!(error(801).message(), "words");
        let gone = judged(Error::new(ErrorKind::Region, "test", "nothing is there"));
        assert!(lasts(&gone));
    }
}

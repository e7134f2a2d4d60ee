//! What a failure of the driver says about what it was asked before: whether it may still be running.

use pdkv_core::Error;

/// Whether an error means that its context is dead: nothing that was asked in it runs any more, and nothing will.
///
/// Others do not stop the device. A graph that is captured (900 and on), a missing context (201) or a wrong argument (1) make a call fail that would have
/// told, or waited; what is under way goes on.
pub(super) fn is_dead(error: &Error) -> bool {
    let status = error.context().iter().find(|(key, _)| *key == "status");
    let status = status.and_then(|(_, value)| value.parse::<u32>().ok());
    // A driver that is gone (4), a device that is (46, 999), memory and links beyond repair (214, 220), then what kernels do wrong: addresses,
    // timeouts, traps, assertions; and a context that was destroyed (709).
    status.is_some_and(|status| matches!(status, 4 | 46 | 214 | 220 | 700 | 702 | 709 | 710 | 714..=719 | 999))
}

#[cfg(test)]
mod tests {
    use pdkv_core::ErrorKind;

    use super::*;

    #[test]
    fn only_a_dead_context_says_that_nothing_runs() {
        let error = |status: u32| Error::new(ErrorKind::Device, "test", "words").with("status", status);
        assert!(
            [4, 46, 214, 700, 702, 709, 710, 719, 999]
                .map(error)
                .iter()
                .all(is_dead)
        );
        assert!(![1, 201, 600, 708, 712, 713, 900, 901].map(error).iter().any(is_dead));
        assert!(!is_dead(&Error::new(ErrorKind::Device, "test", "`719`")));
    }
}

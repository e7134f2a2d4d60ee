//! A panic below a callback of UCX's stops there: here a log listener that panics while UCX reports an error.

#![allow(clippy::print_stdout, reason = "a test says what it skipped and what it found")]

mod common;

use common::library;
use pdkv_core::ErrorKind;
use pdkv_ucx::{Context, Features, Settings, callback_panics};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Panics at every event.
struct Panics;

impl Subscriber for Panics {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        assert_ne!(event.metadata().target(), "ucx", "this panic is part of the test");
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

#[test]
fn a_panic_in_a_callback_does_not_unwind_into_c() {
    let Some(library) = library() else { return };
    let before = callback_panics();
    let settings = Settings::new([("KEEPALIVE_INTERVAL".to_owned(), "soon".to_owned())]);
    let refused = tracing::subscriber::with_default(Panics, || Context::open(&library, &settings, Features::default()));
    let error = refused.expect_err("UCX refuses the value");
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.message().contains("soon"), "what UCX said is kept all the same");
    assert!(
        callback_panics() > before,
        "the listener panicked inside UCX's callback"
    );
    Context::open(&library, &Settings::default(), Features::default()).expect("and UCX goes on");
}

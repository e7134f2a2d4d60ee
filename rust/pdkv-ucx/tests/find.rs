//! The search on this machine, with whatever copies of UCX it has.

#![allow(clippy::print_stdout, reason = "a test says what it skipped")]

mod common;

use pdkv_ucx::find::{self, Search};
use pdkv_ucx::{Origin, Version};

#[test]
fn what_is_found_opens_and_is_then_found_in_the_process() {
    let copies = common::copies();
    if copies.is_empty() {
        return;
    }
    // Named copies stand for wheels.
    let search = Search {
        explicit: None,
        wheels: copies.iter().map(|copy| (Origin::NixlWheel, copy.clone())).collect(),
    };
    let candidates = find::candidates(&search);
    let (found, attempts) = find::find(&search);
    let library = found.unwrap_or_else(|error| panic!("{error}: {attempts:?}"));
    assert!(library.version() >= Version::OLDEST);
    assert_eq!(
        attempts.last().map(|attempt| attempt.outcome.clone()),
        Some(Ok(library.version()))
    );
    assert_eq!(attempts.len(), 1, "the first candidate opens: {attempts:?}");
    assert_eq!(candidates[0].origin, attempts[0].origin);

    if std::env::var_os(find::VARIABLE).is_some() {
        assert_eq!(
            attempts[0].origin,
            Origin::Setting,
            "what the environment names is the only one"
        );
        return;
    }
    let (again, attempts) = find::find(&search);
    assert_eq!(attempts[0].origin, Origin::Process, "{attempts:?}");
    assert_eq!(again.expect("it is loaded").path(), library.path());
    let plain = |name: &std::path::Path| {
        name.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("libucp.so"))
    };
    for other in find::candidates(&search) {
        let mixes = plain(library.path()) && plain(&other.path) && other.origin != Origin::Process;
        assert_eq!(other.refused.is_some(), mixes, "{other:?}");
    }
}

//! A process per copy of UCX and lane: the test binary runs itself again, with one of its tests as the entry.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use super::{LANES, copies};

const LANE: &str = "PDKV_TEST_LANE";
const COPY: &str = "PDKV_TEST_COPY";

/// What copies built with assertions end the process by, where they have a lane of UCX's `tcp`: the peer died while
/// answers to a put stood in line behind something that had to be answered. docs/guides/ucx.md tells users of it.
const BRITTLE: &str = "Assertion `ep->flags & UCT_TCP_EP_FLAG_PUT_TX_WAITING_ACK' failed";

/// How a case ended.
pub(crate) struct Outcome {
    status: ExitStatus,
    output: String,
    errors: String,
}

impl Outcome {
    pub(crate) fn passed(&self) -> bool {
        self.status.success() && self.output.contains("1 passed")
    }

    /// Whether the case printed it.
    pub(crate) fn says(&self, text: &str) -> bool {
        self.output.contains(text)
    }

    /// Whether UCX ended the process by the one assertion that is known and can't be kept from it.
    pub(crate) fn known_abort(&self) -> bool {
        self.status.signal() == Some(libc::SIGABRT) && (self.output.contains(BRITTLE) || self.errors.contains(BRITTLE))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}\n{}\n{}", self.status, self.output, self.errors)
    }
}

/// Runs the test `case` of this binary in a process of its own, with one copy and over one lane.
pub(crate) fn run(case: &str, copy: &Path, lane: &str) -> Outcome {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--test-threads=1", "--nocapture"])
        .env(COPY, copy)
        .env(LANE, lane)
        .output()
        .unwrap();
    Outcome {
        status: output.status,
        output: String::from_utf8_lossy(&output.stdout).into_owned(),
        errors: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// Runs the test `case` of this binary once for every copy and each of `tls`, in a process of its own, and
/// fails with what it printed when one of them does. The case returns at once where it isn't asked for.
pub(crate) fn over(case: &str, tls: &[&str]) {
    for copy in copies() {
        for lane in tls {
            let mut outcome = run(case, &copy, lane);
            // Met once in some thousand deaths of a peer; again and again is something else.
            for _ in 0..3 {
                if outcome.known_abort() {
                    println!("note: {case} over {lane} with {}: {BRITTLE}; once more", copy.display());
                    outcome = run(case, &copy, lane);
                }
            }
            assert!(
                outcome.passed(),
                "{case} over {lane} with {}: {outcome}",
                copy.display()
            );
            for line in outcome.output.lines().filter(|line| line.contains("note:")) {
                println!("{} {lane} {line}", copy.display());
            }
        }
    }
}

/// `over` every lane.
pub(crate) fn over_all(case: &str) {
    over(case, &LANES);
}

/// The lane of this process, in a case that `over` started.
pub(crate) fn lane() -> Option<String> {
    std::env::var(COPY).ok()?;
    std::env::var(LANE).ok()
}

//! The other end in a process of its own: this test binary once more, which does line by line what it is told.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// What is said and answered begins with this, for the test harness says things too.
const MARK: &str = "@ ";
/// Set in the child.
const CHILD: &str = "PDKV_TEST_CHILD";

/// The child, as its parent holds it; it is killed when dropped.
pub(crate) struct Child {
    process: Process,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Child {
    /// Runs the test of that name.
    pub(crate) fn start(test: &str, settings: &[(&str, &str)]) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, "1")
            .envs(settings.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        Self {
            to: process.stdin.take().expect("a pipe"),
            from: BufReader::new(process.stdout.take().expect("a pipe")),
            process,
        }
    }

    /// Says a line and waits for the answer.
    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("the child listens");
    }

    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let count = self.from.read_line(&mut line).expect("the child talks");
            assert!(count > 0, "the child has ended: {:?}", self.process.wait());
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }

    /// Stops all that it does, which its threads do one after the other.
    pub(crate) fn stop(&self) {
        let mut kill = Command::new("kill");
        let kill = kill.args(["-STOP", &self.process.id().to_string()]).status();
        assert!(kill.expect("a way to stop it").success());
        let end = std::time::Instant::now() + Duration::from_secs(120);
        while !self.threads().iter().all(|status| status.contains("T (stopped)")) {
            assert!(std::time::Instant::now() < end, "it never stopped");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What the system says of each of its threads.
    pub(crate) fn threads(&self) -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.process.id())).expect("it runs");
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
            .collect()
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("a child of ours");
        self.process.wait().expect("it ends");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Whether this process is the other end of a test.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// In the child: does what each line says, until there are no more.
pub(crate) fn obey(mut what: impl FnMut(&[&str]) -> String) {
    for line in std::io::stdin().lines() {
        let line = line.expect("the parent talks");
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = what(&words);
        writeln!(std::io::stdout(), "{MARK}{answer}").expect("the parent listens");
    }
}

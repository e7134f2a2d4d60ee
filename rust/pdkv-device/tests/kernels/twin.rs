//! The host twin: the kernels compiled by a C++ compiler into a program that runs cases from its standard input.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use pdkv_device::kernels::{Job, Launch, PageTables};

use crate::memory::Memory;

/// A running twin; ends when dropped. One that a case has ended is replaced, so that the case can be made smaller.
pub(crate) struct Twin {
    program: PathBuf,
    child: Child,
    input: Option<ChildStdin>,
    output: ChildStdout,
}

/// What a case leaves behind.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) memory: Memory,
    pub(crate) sums: Vec<u64>,
    pub(crate) flag: u64,
    pub(crate) arrived: u32,
}

/// Which checks are compiled in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    Plain,
    /// Address and undefined-behaviour sanitizers.
    Sanitized,
}

/// The compiled twin; `None`, with the reason printed, where there is no compiler.
pub(crate) fn compile(build: Build) -> Option<&'static Path> {
    static PROGRAMS: [OnceLock<Option<PathBuf>>; 2] = [OnceLock::new(), OnceLock::new()];
    PROGRAMS[build as usize].get_or_init(|| compile_now(build)).as_deref()
}

fn compile_now(build: Build) -> Option<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("twin-{build:?}"));
    std::fs::create_dir_all(&folder).unwrap();
    let program = folder.join(format!("twin-{}", std::process::id()));
    let mut command = Command::new("c++");
    // CUDA compilers know that memory has any type; `unroll` is for devices.
    command.args([
        "-std=c++17",
        "-O1",
        "-g",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-Werror",
    ]);
    command.args(["-Wno-unknown-pragmas", "-Wno-maybe-uninitialized"]);
    if build == Build::Sanitized {
        command.args(["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]);
    }
    command.arg("-I").arg(here.join("../../cuda"));
    command.arg("-I").arg(here.join("tests/kernels"));
    command.args([Path::new("-o"), &program, &here.join("tests/kernels/twin.cpp")]);
    match command.output() {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(program)
        }
        Err(error) => {
            assert!(
                std::env::var_os("PDKV_CXX_REQUIRED").is_none(),
                "no C++ compiler, and PDKV_CXX_REQUIRED is set: {error}"
            );
            println!("skipped: no C++ compiler ({error})");
            None
        }
    }
}

/// The names of the kernels in the twin.
pub(crate) fn entries(program: &Path) -> Vec<String> {
    let output = Command::new(program).arg("--entries").output().unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

impl Twin {
    pub(crate) fn start(program: &Path) -> Self {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            input: child.stdin.take(),
            output: child.stdout.take().unwrap(),
            child,
            program: program.to_owned(),
        }
    }

    /// Runs launches of jobs over memory. Each comes with the job's first lane among all lanes. `seed` says in which order blocks
    /// run and when bulk copies happen; the last launch raises the flag to `flag`. `None` when the twin ended, which says why on its standard error.
    pub(crate) fn run(
        &mut self,
        memory: &Memory,
        tables: &PageTables,
        work: &[(&Job, Vec<Launch>)],
        seed: u32,
        flag: u64,
    ) -> Option<Outcome> {
        let outcome = self.try_run(memory, tables, work, seed, flag);
        if outcome.is_none() {
            *self = Self::start(&self.program.clone());
        }
        outcome
    }

    fn try_run(
        &mut self,
        memory: &Memory,
        tables: &PageTables,
        work: &[(&Job, Vec<Launch>)],
        seed: u32,
        flag: u64,
    ) -> Option<Outcome> {
        let pages = work.iter().map(|(job, _)| job.num_pages).max().unwrap_or(0) as usize;
        let case = case(memory, tables, work, pages, seed, flag);
        let mut input = self.input.as_ref()?;
        // A twin that has failed reads no more.
        input.write_all(&case).and_then(|()| input.flush()).ok()?;
        let mut memory = memory.clone();
        for (_, bytes) in &mut memory.regions {
            self.output.read_exact(bytes).ok()?;
        }
        let mut word = || {
            let mut word = [0; 8];
            self.output
                .read_exact(&mut word)
                .ok()
                .map(|()| u64::from_le_bytes(word))
        };
        let sums = (0..pages).map(|_| word()).collect::<Option<_>>()?;
        let flag = word()?;
        let mut arrived = [0; 4];
        self.output.read_exact(&mut arrived).ok()?;
        Some(Outcome {
            memory,
            sums,
            flag,
            arrived: u32::from_le_bytes(arrived),
        })
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

fn case(
    memory: &Memory,
    tables: &PageTables,
    work: &[(&Job, Vec<Launch>)],
    pages: usize,
    seed: u32,
    flag: u64,
) -> Vec<u8> {
    let mut case = vec![b'+'];
    let put = |case: &mut Vec<u8>, value: usize| case.extend((value as u64).to_le_bytes());
    put(&mut case, memory.regions.len());
    for (base, bytes) in &memory.regions {
        case.extend(base.to_le_bytes());
        put(&mut case, bytes.len());
        case.extend(bytes);
    }
    for table in [&tables.src, &tables.dst] {
        let table = table.as_deref().unwrap_or_default();
        put(&mut case, table.len());
        case.extend(table.iter().flat_map(|page| page.to_le_bytes()));
    }
    put(&mut case, work.iter().map(|(job, _)| job.lanes.len()).sum());
    for lane in work.iter().flat_map(|(job, _)| &job.lanes) {
        case.extend(lane.to_bytes());
    }
    put(&mut case, pages);
    let launches: usize = work.iter().map(|(_, launches)| launches.len()).sum();
    put(&mut case, launches);
    let (mut lanes, mut left) = (0, launches);
    for (job, of_job) in work {
        for launch in of_job {
            let name = launch.entry.name();
            put(&mut case, name.len());
            case.extend(name.as_bytes());
            for word in [launch.grid, launch.block, launch.shared_bytes, seed] {
                case.extend(word.to_le_bytes());
            }
            let mut view = launch.view;
            view.lanes = lanes + u64::from(launch.first_lane);
            view.src_pages = u64::from(tables.src.is_some());
            view.dst_pages = u64::from(tables.dst.is_some());
            left -= 1;
            (view.flag, view.flag_value) = (u64::from(left == 0 && flag != 0), flag);
            case.extend(view.to_bytes());
        }
        lanes += job.lanes.len() as u64;
    }
    case
}

//! The search over made-up machines: a folder stands for `/`, and opening a library reads a version from its file.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A made-up machine in a folder of its own.
struct Machine {
    root: PathBuf,
    variables: HashMap<&'static str, OsString>,
    maps: String,
}

impl Machine {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = std::env::temp_dir().join(format!("pdkv-find-{}-{number}", std::process::id()));
        fs::create_dir_all(&root).expect("the folder of the test");
        Self {
            root,
            variables: HashMap::new(),
            maps: String::new(),
        }
    }

    /// Puts a file there and gives its path.
    fn file(&self, path: &str, text: &str) -> PathBuf {
        let path = self.root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a folder")).expect("the folder");
        fs::write(&path, text).expect("the file");
        path
    }

    /// A copy of UCX with modules.
    fn copy(&self, library: &str, version: &str, modules: &[&str]) -> PathBuf {
        let path = self.file(library, version);
        for module in modules {
            let file = path
                .parent()
                .expect("a folder")
                .join(format!("ucx/libuct_{module}.so.0"));
            fs::create_dir_all(file.parent().expect("a folder")).expect("the folder");
            fs::write(file, "").expect("the file");
        }
        path
    }

    fn has_rdma(&self) {
        self.file("/sys/class/infiniband/mlx5_0", "");
    }

    /// Says that the process has mapped a library.
    fn loads(&mut self, path: &Path) {
        let line = format!(
            "7f00-7f10 r-xp 00000000 fe:00 123                  {}\n",
            path.display()
        );
        self.maps.push_str(&line);
    }

    fn look<T>(&self, look: impl FnOnce(&Host<'_>) -> T) -> T {
        look(&Host {
            variable: &|name| self.variables.get(name).cloned(),
            root: &self.root,
            maps: &|| self.maps.clone(),
        })
    }

    /// What the search takes, and what it tried.
    fn find(&self, search: &Search) -> (Result<PathBuf>, Vec<Attempt>) {
        let (found, attempts) = self.look(|host| first(host, search, &open, |(_, version)| *version));
        (found.map(|(path, _)| path), attempts)
    }

    fn found(&self, search: &Search) -> PathBuf {
        self.find(search).0.expect("a copy")
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root); // a leftover in the folder for such
    }
}

fn open(path: &Path, _: Origin) -> Result<(PathBuf, Version)> {
    let refuse = |what: String| Error::new(ErrorKind::Unsupported, "open UCX", what);
    let text = fs::read_to_string(path).map_err(|error| refuse(error.to_string()))?;
    let numbers: Vec<u32> = text
        .split([' ', '.'])
        .filter_map(|number| number.parse().ok())
        .collect();
    match numbers[..] {
        [major, minor, release] if minor >= 13 => {
            let version = Version { major, minor, release };
            Ok((path.to_owned(), version))
        }
        _ => Err(refuse(format!("`{text}` is too old"))),
    }
}

/// A version, and the text by which assertions show in a file.
const WITH_ASSERTIONS: &str = "1.13.1 !ucs_hlist_is_empty(&ep->ext->proto_reqs)";
const DEBIAN: &str = "/usr/lib64/libucp.so.0";
const NIXL: &str = "/site/nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0";
const WHEEL: &str = "/site/libucx/lib/libucp.so.0";

fn wheels(machine: &Machine) -> Search {
    let folder = |path: &str| machine.root.join(path);
    Search {
        explicit: None,
        wheels: vec![
            (Origin::NixlWheel, folder("site/nixl_cu12.libs")),
            (Origin::LibucxWheel, folder("site/libucx/lib")),
        ],
    }
}

#[test]
fn the_order_is_system_nixl_libucx() {
    let machine = Machine::new();
    let wheel = machine.copy(WHEEL, "1.22.0", &["cma", "cuda"]);
    assert_eq!(machine.found(&wheels(&machine)), wheel);
    let nixl = machine.copy(NIXL, "1.23.0", &["cma", "ib"]);
    assert_eq!(machine.found(&wheels(&machine)), nixl);
    let debian = machine.copy(DEBIAN, "1.13.1", &["cma"]);
    assert_eq!(machine.found(&wheels(&machine)), debian);
    let hpcx = machine.copy("/opt/hpcx-v2.21/ucx/lib/libucp.so.0", "1.18.0", &["ib"]);
    assert_eq!(machine.found(&wheels(&machine)), hpcx);
    let threads = machine.copy("/opt/hpcx-v2.21/ucx/mt/lib/libucp.so.0", "1.18.0", &["ib"]);
    assert_eq!(machine.found(&wheels(&machine)), threads);
}

#[test]
fn the_environment_of_hpcx_and_of_the_loader_come_before_what_lies_about() {
    let mut machine = Machine::new();
    machine.copy("/opt/hpcx/ucx/lib/libucp.so.0", "1.18.0", &["ib"]);
    let own = machine.copy("/own/ucx/lib/libucp.so.0", "1.20.0", &[]);
    let folder = own.parent().expect("a folder").as_os_str().to_owned();
    machine.variables.insert("LD_LIBRARY_PATH", folder);
    assert_eq!(machine.found(&Search::default()), own);
    let named = machine.copy("/modules/hpcx/ucx/lib/libucp.so.0", "1.19.0", &["ib"]);
    let root = machine.root.join("modules/hpcx").into_os_string();
    machine.variables.insert("HPCX_DIR", root);
    assert_eq!(machine.found(&Search::default()), named);
}

#[test]
fn the_loaders_configuration_is_read() {
    let machine = Machine::new();
    let there = machine.copy("/vendor/lib/libucp.so.0", "1.17.0", &[]);
    machine.file("/etc/ld.so.conf.d/vendor.conf", "# ours\n/vendor/lib\n");
    assert_eq!(machine.found(&Search::default()), there);
}

#[test]
fn a_setting_is_the_only_one_tried() {
    let mut machine = Machine::new();
    machine.copy(DEBIAN, "1.13.1", &[]);
    let old = machine.copy("/old/libucp.so.0", "1.9.0", &[]);
    let mut search = Search {
        explicit: Some(old.clone()),
        ..Search::default()
    };
    let (found, attempts) = machine.find(&search);
    let error = found.expect_err("too old, and nothing else was asked for");
    assert_eq!((error.kind(), attempts.len()), (ErrorKind::Unsupported, 1));
    assert_eq!(attempts[0].origin, Origin::Setting);
    assert!(error.message().contains("too old"), "{error}");

    let newer = machine.copy("/new/ucx/lib/libucp.so.0", "1.20.0", &[]);
    machine
        .variables
        .insert(VARIABLE, machine.root.join("new/ucx").into_os_string());
    assert_eq!(
        machine.found(&Search::default()),
        newer,
        "a folder will do, and so will the environment"
    );
    search.explicit = Some(machine.root.join(DEBIAN.trim_start_matches('/')));
    assert_eq!(
        machine.found(&search),
        machine.root.join("usr/lib64/libucp.so.0"),
        "the caller comes first"
    );
}

#[test]
fn what_the_process_has_loaded_comes_first_also_under_a_hashed_name() {
    let mut machine = Machine::new();
    machine.copy(DEBIAN, "1.13.1", &["ib"]);
    let nixl = machine.copy(NIXL, "1.23.0", &["ib"]);
    machine.loads(&nixl);
    let (found, attempts) = machine.find(&wheels(&machine));
    assert_eq!(found.expect("it is loaded"), nixl);
    assert_eq!(attempts.len(), 1);
    assert_eq!(attempts[0].origin, Origin::Process);
}

#[test]
fn an_old_copy_in_the_process_is_passed_over_but_no_plain_copy_is_put_beside_it() {
    let mut machine = Machine::new();
    let old = machine.copy("/torch/lib/libucp.so.0", "1.9.0", &[]);
    machine.loads(&old);
    machine.loads(&old.with_file_name("libucs.so.0"));
    machine.copy(DEBIAN, "1.13.1", &[]);
    machine.copy(WHEEL, "1.22.0", &[]);
    let (found, attempts) = machine.find(&wheels(&machine));
    let error = found.expect_err("every other copy would be bound to the old one");
    let reasons: Vec<_> = attempts
        .iter()
        .filter_map(|attempt| attempt.outcome.as_ref().err())
        .collect();
    assert!(reasons[0].contains("too old"), "{reasons:?}");
    assert!(reasons[1].contains("would bind"), "{reasons:?}");
    assert!(reasons[2].contains("would bind"), "{reasons:?}");
    assert!(error.hint().is_some());

    let nixl = machine.copy(NIXL, "1.23.0", &[]);
    assert_eq!(
        machine.found(&wheels(&machine)),
        nixl,
        "hashed names bind to nobody else"
    );
}

#[test]
fn on_a_host_with_rdma_a_copy_with_rdma_wins() {
    let mut machine = Machine::new();
    machine.copy(DEBIAN, "1.16.0", &["cma"]);
    let wheel = machine.copy(WHEEL, "1.22.0", &["cma", "cuda"]);
    let nixl = machine.copy(NIXL, "1.23.0", &["cma", "ib", "ib_mlx5"]);
    machine.has_rdma();
    assert_eq!(machine.look(devices), ["mlx5_0"]);
    assert_eq!(machine.found(&wheels(&machine)), nixl);
    machine.loads(&wheel);
    machine.loads(&wheel.with_file_name("libucs.so.0"));
    assert_eq!(machine.found(&wheels(&machine)), nixl, "also over one that is loaded");
    let order: Vec<_> = machine.look(|host| list(host, &wheels(&machine)));
    let origins: Vec<_> = order.iter().map(|candidate| candidate.origin).collect();
    assert_eq!(origins, [Origin::NixlWheel, Origin::Process, Origin::System]);
    assert!(order[2].refused.is_some());
}

#[test]
fn copies_with_assertions_come_last_unless_they_alone_have_rdma_or_are_loaded() {
    let mut machine = Machine::new();
    let debian = machine.copy(DEBIAN, WITH_ASSERTIONS, &["ib"]);
    let wheel = machine.copy(WHEEL, "1.22.0", &["cuda"]);
    assert_eq!(machine.found(&wheels(&machine)), wheel);
    machine.has_rdma();
    assert_eq!(machine.found(&wheels(&machine)), debian, "the one with RDMA");
    let nixl = machine.copy(NIXL, "1.23.0", &["ib"]);
    assert_eq!(machine.found(&wheels(&machine)), nixl);
    machine.loads(&debian);
    assert_eq!(
        machine.found(&wheels(&machine)),
        debian,
        "rather one that asserts than two copies"
    );
}

#[test]
fn one_copy_under_several_names_is_one_candidate() {
    let mut machine = Machine::new();
    let debian = machine.copy(DEBIAN, "1.13.1", &["ib", "cma"]);
    std::os::unix::fs::symlink(machine.root.join("usr/lib64"), machine.root.join("usr/lib")).expect("a link");
    machine.loads(&debian);
    let order = machine.look(|host| list(host, &Search::default()));
    assert_eq!(order.len(), 1);
    assert_eq!(order[0].modules, ["cma", "ib"]);
    assert!(order[0].has_rdma());
}

#[test]
fn where_there_is_nothing_the_error_lists_every_place_and_says_what_to_install() {
    let machine = Machine::new();
    let (found, attempts) = machine.find(&Search::default());
    let error = found.expect_err("nothing is there");
    let origins: Vec<_> = attempts.iter().map(|attempt| attempt.origin).collect();
    assert_eq!(
        origins,
        [Origin::System, Origin::Process, Origin::NixlWheel, Origin::LibucxWheel]
    );
    assert_eq!(attempts[0].place, "libucp.so.0");
    assert!(error.message().contains("libucp.so.0"), "{error}");
    assert!(error.hint().is_some_and(|hint| hint.contains("pdkv[ucx]")), "{error:?}");
}

#[test]
fn files_with_similar_names_are_not_taken() {
    let machine = Machine::new();
    machine.file("/usr/lib64/libucp_set.so.0", "1.22.0");
    machine.file("/usr/lib64/libucp.a", "1.22.0");
    assert!(machine.find(&Search::default()).0.is_err());
    for (name, expected) in [
        ("libucp.so.0.0.0", true),
        ("libucp-b39.so.0", true),
        ("libucpx.so", false),
    ] {
        assert_eq!(places::is_named(name, "libucp"), expected, "{name}");
    }
}

//! Lists of spans, which in unit tests are taken from any UCX that has them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pdkv_core::lane::OneSidedPolicy;
use pdkv_device::{HostRegion, HugePages};
use pdkv_ucx::{Library, Origin, Version};

use crate::{Engine, EngineConfig, LocalSpan, RawOptions, RemoteSpan, TransportKind, UcxConfig};

const WAIT: Duration = Duration::from_secs(60);
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1500;

/// A copy whose transports carry lists, of those that the environment names for tests.
fn copy_with_lists() -> Option<PathBuf> {
    let listed = std::env::var("PDKV_TEST_UCX").unwrap_or_default();
    let new = |path: &PathBuf| {
        let library = Library::open(path, Origin::Setting);
        library.is_ok_and(|library| library.version() >= Version::new(1, 23, 0))
    };
    let found = listed.split(':').map(PathBuf::from).find(new);
    let required = std::env::var_os("PDKV_UCX_REQUIRED").is_some();
    assert!(found.is_some() || !required, "no UCX of 1.23 or newer among `{listed}`");
    found
}

#[test]
fn many_spans_are_written_by_lists_and_each_arrives() {
    let Some(library) = copy_with_lists() else { return };
    let config = || EngineConfig {
        transports: Some(vec![TransportKind::Ucx]),
        ucx: UcxConfig {
            library: Some(library.clone()),
            one_sided: OneSidedPolicy::Any,
            settings: vec![("TLS".to_owned(), "posix,cma".to_owned())],
            ..UcxConfig::default()
        },
        ..EngineConfig::default()
    };
    let (writer, owner) = (
        Engine::new("writer", config()).unwrap(),
        Engine::new("owner", config()).unwrap(),
    );
    let peer = writer.connect(owner.address().unwrap(), WAIT).unwrap();
    let memory = || HostRegion::allocate(2 * BLOCKS * BLOCK, HugePages::Never).unwrap();
    let (here, there) = (memory(), memory());
    for block in 0..BLOCKS {
        let value = block.to_le_bytes().repeat(BLOCK as usize / 8);
        here.write_at(2 * block * BLOCK, &value).unwrap();
    }
    let source = writer.register(Arc::clone(&here), None, true).unwrap();
    let target = owner.register(Arc::clone(&there), None, true).unwrap();
    // Every other block on one side and backwards on the other: nothing merges.
    let from: Vec<_> = (0..BLOCKS)
        .map(|block| LocalSpan {
            region: source.id(),
            offset: 2 * block * BLOCK,
            len: BLOCK,
        })
        .collect();
    let to = (0..BLOCKS).map(|block| RemoteSpan {
        region: target.describe().region,
        offset: 2 * (BLOCKS - 1 - block) * BLOCK,
        len: BLOCK,
    });
    let transfer = peer
        .write(&to.collect::<Vec<_>>(), &from, None, &RawOptions::default())
        .unwrap();
    transfer.wait(Some(WAIT)).unwrap();
    assert!(
        transfer.path().detail.contains("lists of spans"),
        "{:?}",
        transfer.path()
    );
    assert_eq!(transfer.stats().bytes, BLOCKS * BLOCK);
    let mut got = vec![0; BLOCK as usize];
    for block in 0..BLOCKS {
        there.read_at(2 * (BLOCKS - 1 - block) * BLOCK, &mut got).unwrap();
        assert!(got == block.to_le_bytes().repeat(BLOCK as usize / 8), "block {block}");
        there.read_at((2 * (BLOCKS - 1 - block) + 1) * BLOCK, &mut got).unwrap();
        assert!(got.iter().all(|&byte| byte == 0), "a gap was written");
    }
}

//! What is kept of a claim goes with it, whoever is a moment late.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::id::Incarnation;
use pdkv_core::layout::{LayerTensors, LayoutRequest, TensorFacts};
use pdkv_core::session::{self, features};
use pdkv_core::shard::Shard;
use pdkv_core::wire::{self, Abandon, Claim, Hello, HostFacts, Message};
use pdkv_device::{HostRegion, HugePages};

use super::*;
use crate::{Engine, EngineConfig, Export, KvCache};

const WAIT: Duration = Duration::from_secs(60);
const LAST: u64 = 4;

/// An owner with a cache of four blocks, and a peer of which nothing but the hello is true.
struct Scene {
    owner: Engine,
    cache: KvCache,
    export: Export,
    peer: PeerKey,
    _stream: TcpStream,
}

fn cache(owner: &Engine) -> KvCache {
    let memory = HostRegion::allocate(4096, HugePages::Never).unwrap();
    let tensor = LayerTensors::Joined(TensorFacts {
        name: "layers.0".to_owned(),
        address: memory.address(),
        shape: vec![LAST, 1, 1, 1024],
        strides_bytes: vec![1024, 1024, 1024, 1],
        item_bytes: 1,
        dtype: DType::U8,
    });
    let resolved = LayoutRequest::parse("BHNC", 1).unwrap().resolve(&[tensor]).unwrap();
    owner
        .register_kv_cache(vec![memory], resolved.layout, Shard::whole(1, 1), "test")
        .unwrap()
}

fn hello() -> Hello {
    Hello {
        min_version: session::MIN_VERSION,
        max_version: session::MAX_VERSION,
        features: features::OURS,
        name: "fake".to_owned(),
        incarnation: Incarnation::new([1; 16]),
        address: String::new(),
        host: HostFacts::default(),
        peer_timeout: WAIT,
        heartbeat: WAIT,
        regions: Vec::new(),
        caches: Vec::new(),
        attempt: [7; 16],
    }
}

impl Scene {
    fn new() -> Self {
        let owner = Engine::new("owner", EngineConfig::default()).unwrap();
        let cache = cache(&owner);
        let table = BlockTable::from_ids(&[0, 1, 2, 3]);
        let export = cache.export(table, LAST, b"", 1, WAIT).unwrap();
        let mut stream = TcpStream::connect(owner.address().unwrap()).unwrap();
        let hello = wire::encode(&Message::Hello(Box::new(hello()))).unwrap();
        stream.write_all(&hello).unwrap();
        let peer = loop {
            if let Some(&peer) = owner.shared().lock().peers.keys().next() {
                break peer;
            }
            std::thread::yield_now();
        };
        Self {
            owner,
            cache,
            export,
            peer,
            _stream: stream,
        }
    }

    fn tell(&self, message: Message) {
        let peer = self.peer;
        let told = self
            .owner
            .shared()
            .drive(|state, now| state.node.handle(now, peer, message));
        told.unwrap();
    }

    fn claim(&self, transfer: TransferId) {
        self.tell(Message::Claim(Box::new(Claim {
            transfer,
            reference: self.export.reference().clone(),
            expected_digest: None,
            expected_fingerprint: self.cache.fingerprint(),
            first_block: 0,
            num_blocks: LAST as u32,
            first_layer: 0,
            num_layers: 1,
            transport: "tcp".to_owned(),
            remaining: WAIT,
            wants_table: false,
            order: None,
        })));
    }

    fn abandon(&self, transfer: TransferId) {
        self.tell(Message::Abandon(Abandon {
            transfer,
            reason: ErrorKind::TransferCancelled,
        }));
    }

    /// What the owner says to a request for the last block and as many more.
    fn ask(&self, transfer: TransferId, units: u64) -> Result<Permit> {
        let request = Request {
            verb: Verb::Get,
            target: Target::Claim {
                transfer,
                first_unit: LAST - 1,
                units,
            },
            bytes: 1024 * units,
        };
        Permit::new(self.owner.shared(), self.peer, &request)
    }

    fn kept(&self) -> usize {
        self.owner.shared().servings.live().len()
    }
}

#[test]
fn a_claim_that_ends_while_it_is_looked_up_is_not_kept() {
    let scene = Scene::new();
    let (shared, transfer) = (scene.owner.shared(), TransferId(1));
    scene.claim(transfer);
    let serving = Serving::of(shared, scene.peer, transfer).unwrap();
    scene.abandon(transfer);
    assert!(shared.servings.enter(shared, scene.peer, transfer, serving).is_err());
    assert_eq!(scene.kept(), 0);
    // Nor is it afterwards, whatever is asked.
    assert!(scene.ask(transfer, 1).is_err());
    assert_eq!(scene.kept(), 0);
}

#[test]
fn what_is_kept_for_refused_requests_goes_with_the_claim() {
    let scene = Scene::new();
    for number in 1..=3 {
        let transfer = TransferId(number);
        scene.claim(transfer);
        let refused = scene.ask(transfer, 2).err().expect("two blocks past the last");
        assert_eq!(refused.kind(), ErrorKind::Layout);
        assert_eq!(scene.kept(), 1);
        let permit = scene.ask(transfer, 1).expect("the last block");
        scene.abandon(transfer);
        assert_eq!(scene.kept(), 0);
        assert!(permit.serving.ended.load(Ordering::Acquire));
    }
}

//! Two engines with caches whose every byte tells where it belongs.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod child;
pub(crate) mod fake;
pub(crate) mod lane;
pub(crate) mod standin;
pub(crate) mod ucx;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use pdkv_core::block_table::BlockTable;
use pdkv_core::dtype::DType;
use pdkv_core::id::RegionId;
use pdkv_core::layout::{KvLayout, LayerTensors, LayoutRequest, TensorFacts};
use pdkv_core::shard::Shard;
use pdkv_device::cuda::{BulkSize, DeviceBuffer, DeviceRegion, Gpu, HostPaths};
use pdkv_device::{HostRegion, HugePages, Memory as Registered};
use pdkv_engine::{Engine, EngineConfig, GpuMemory, KvCache, LinkInfo, LocalSpan, Peer, RemoteSpan, TransportKind};

pub(crate) const LAYERS: u64 = 3;
pub(crate) const BLOCKS: u32 = 64;
pub(crate) const HEADS: u64 = 2;
pub(crate) const TOKENS: u64 = 4;
pub(crate) const CONTENT: u64 = 32;
pub(crate) const BLOCK_BYTES: u64 = HEADS * TOKENS * CONTENT;

/// The transports that need nothing but this machine.
pub(crate) const OWN: &[TransportKind] = &[
    TransportKind::Inproc,
    TransportKind::Shm,
    TransportKind::Cma,
    TransportKind::Tcp,
];

/// Every transport that is to be had here, `ucx` in both manners.
pub(crate) fn every_way() -> Vec<Way> {
    let mut ways: Vec<Way> = OWN.iter().map(|&kind| kind.into()).collect();
    if ucx::is_here() {
        ways.extend(["tcp", "posix,cma"].map(|tls| Way::from(ucx::Lane::puts(tls))));
        ways.extend(["tcp", "posix,cma"].map(|tls| Way::from(ucx::Lane::messages(tls))));
    }
    ways
}

/// Where a cache's memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    Shared,
    Private,
    /// Of GPU 0, which is the stand-in's: of our own allocation, which descriptors name.
    Device,
    /// Of GPU 0, as `cudaMalloc` makes it, which CUDA IPC names.
    Malloc,
    /// As `Device`, of GPU 1.
    Other,
    /// Of GPU 0, many allocations side by side, as expandable segments are.
    Segments,
}

/// A region of ours and one of the peer's, each from its first byte on, for a raw transfer.
pub(crate) fn whole(here: RegionId, there: RegionId, len: u64) -> ([LocalSpan; 1], [RemoteSpan; 1]) {
    let near = LocalSpan {
        region: here,
        offset: 0,
        len,
    };
    let far = RemoteSpan {
        region: there,
        offset: 0,
        len,
    };
    ([near], [far])
}

pub(crate) fn memory_for(kind: TransportKind) -> Memory {
    if kind == TransportKind::Shm {
        Memory::Shared
    } else {
        Memory::Private
    }
}

/// One transport, and how.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) kind: TransportKind,
    pub(crate) lane: Option<ucx::Lane>,
    /// The memory of the producer and of the consumer.
    pub(crate) memory: [Memory; 2],
}

impl From<TransportKind> for Way {
    fn from(kind: TransportKind) -> Self {
        Self {
            kind,
            lane: None,
            memory: [memory_for(kind); 2],
        }
    }
}

impl Way {
    /// By a GPU, between such memory.
    pub(crate) fn cuda(producer: Memory, consumer: Memory) -> Self {
        Self {
            memory: [producer, consumer],
            ..TransportKind::Cuda.into()
        }
    }

    /// By a lane of UCX, with memory of a GPU at one end or at both.
    pub(crate) fn lane_of_gpus(lane: ucx::Lane, producer: Memory, consumer: Memory) -> Self {
        Self {
            memory: [producer, consumer],
            ..lane.into()
        }
    }

    /// By tcp, with memory of a GPU at one end or at both.
    pub(crate) fn staged(producer: Memory, consumer: Memory) -> Self {
        Self {
            memory: [producer, consumer],
            ..TransportKind::Tcp.into()
        }
    }

    /// Whether some of the memory is a GPU's.
    pub(crate) fn is_of_gpus(&self) -> bool {
        let host = |memory: &Memory| matches!(memory, Memory::Shared | Memory::Private);
        !self.memory.iter().all(host)
    }

    /// Whether it is a lane of UCX between memory of which some is a GPU's: no adapter is here.
    pub(crate) fn is_emulated_for_gpus(&self) -> bool {
        self.lane.is_some() && self.is_of_gpus()
    }

    /// What its link is to say of memory of GPUs once bytes have moved.
    pub(crate) fn says_of_gpus(&self) -> GpuMemory {
        match (self.kind, self.lane) {
            (TransportKind::Cuda, _) => GpuMemory::Direct,
            (TransportKind::Tcp, _) => GpuMemory::Staged,
            (_, Some(lane)) if lane.is_direct() && self.is_of_gpus() => GpuMemory::Staged,
            (_, Some(lane)) if lane.is_direct() => GpuMemory::Untried,
            _ => GpuMemory::Refused,
        }
    }

    /// Whether no payload byte rests on the way.
    pub(crate) fn is_direct(&self) -> bool {
        let staged = self.kind == TransportKind::Tcp && self.is_of_gpus();
        !staged && self.lane.is_none_or(ucx::Lane::is_direct)
    }

    pub(crate) fn engine(&self, name: &str) -> Engine {
        let config = EngineConfig {
            ucx: self.lane.map(ucx::config).unwrap_or_default(),
            ..config(&[self.kind])
        };
        Engine::new(name, config).expect("an engine starts")
    }
}

fn config(kinds: &[TransportKind]) -> EngineConfig {
    EngineConfig {
        transports: Some(kinds.to_vec()),
        heartbeat: Duration::from_millis(200),
        peer_timeout: Duration::from_secs(60),
        ..EngineConfig::default()
    }
}

pub(crate) fn engine(name: &str, kinds: &[TransportKind]) -> Engine {
    Engine::new(name, config(kinds)).expect("an engine starts")
}

/// Any port of a loopback address that no other test uses: once it is let go, nobody takes it.
pub(crate) fn place_of_its_own() -> String {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    // Whoever asks for any port of 127.0.0.1 never gets one of these.
    format!("127.{}.{high}.{low}:0", COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Memory that nobody else frees: leaked on purpose, tests are short.
pub(crate) fn private(len: u64) -> Arc<HostRegion> {
    let bytes = vec![0_u8; len as usize].leak();
    // SAFETY: leaked, so mapped, readable and writable for ever; the slice is not used again.
    unsafe { HostRegion::from_raw(bytes.as_mut_ptr() as u64, len, Box::new(())) }.expect("a region")
}

pub(crate) fn allocate(memory: Memory, len: u64) -> Arc<HostRegion> {
    match memory {
        Memory::Shared => HostRegion::allocate(len, HugePages::Never).expect("a pool"),
        Memory::Private => private(len),
        _ => panic!("host memory is wanted"),
    }
}

/// Memory of any kind.
pub(crate) fn memory(kind: Memory, len: u64) -> Registered {
    match kind {
        Memory::Device | Memory::Other => {
            let gpu = Gpu::open(u32::from(kind == Memory::Other)).expect("the stand-in");
            DeviceRegion::allocate(&gpu, len).expect("device memory").into()
        }
        Memory::Malloc => {
            let gpu = Gpu::open(0).expect("the stand-in");
            let buffer = DeviceBuffer::new(gpu.context(), len as usize).expect("device memory");
            buffer.fill(gpu.stream(), 0).expect("zeros");
            gpu.stream().synchronize().expect("zeros");
            let address = buffer.address();
            // SAFETY: the buffer goes with the region.
            let region = unsafe { DeviceRegion::from_raw(&gpu, address, len, Box::new(buffer)) };
            region.expect("device memory").into()
        }
        Memory::Segments => {
            let gpu = Gpu::open(0).expect("the stand-in");
            // It begins in the middle of the first and ends in the middle of the last.
            let (before, segment) = (1 << 20, 2 << 20);
            let count = (before + len).div_ceil(segment);
            let address = standin::segments(count as i32) + before;
            // SAFETY: never freed, for tests are short.
            let region = unsafe { DeviceRegion::from_raw(&gpu, address, len, Box::new(())) };
            region.expect("device memory").into()
        }
        host => allocate(host, len).into(),
    }
}

/// `[B, H, N, C]`, one tensor a layer, all in one region.
fn layout(address: u64, content: u64) -> KvLayout {
    let shape = vec![u64::from(BLOCKS), HEADS, TOKENS, content];
    let block_bytes = HEADS * TOKENS * content;
    let strides = [block_bytes, TOKENS * content, content, 1]
        .map(u64::cast_signed)
        .to_vec();
    let layer_bytes = u64::from(BLOCKS) * block_bytes;
    let tensors: Vec<_> = (0..LAYERS)
        .map(|layer| {
            LayerTensors::Joined(TensorFacts {
                name: format!("layers.{layer}"),
                address: address + layer * layer_bytes,
                shape: shape.clone(),
                strides_bytes: strides.clone(),
                item_bytes: 1,
                dtype: DType::U8,
            })
        })
        .collect();
    let request = LayoutRequest::parse("BHNC", TOKENS as u32).expect("axes");
    let resolved = request.resolve(&tensors).expect("a layout");
    assert!(!resolved.regions.is_empty());
    resolved.layout
}

pub(crate) fn cache(engine: &Engine, memory: Memory) -> KvCache {
    cache_of(engine, memory, CONTENT)
}

/// A cache with so many bytes for each token and head.
pub(crate) fn cache_of(engine: &Engine, kind: Memory, content: u64) -> KvCache {
    let len = LAYERS * u64::from(BLOCKS) * HEADS * TOKENS * content;
    let region = memory(kind, len);
    let layout = layout(region.address(), content);
    // Adjacent tensors may be one region or several, as the layout decides.
    let regions = regions_of(&region, &layout);
    let cache = engine
        .register_kv_cache(regions, layout, Shard::whole(LAYERS as u32, HEADS as u32), "test")
        .expect("registers");
    if let Registered::Device(region) = &region {
        await_measurement(region.gpu());
    }
    cache
}

/// Waits until what is measured once beside a GPU's first registration has been, so that a test counts, holds and fails its own calls alone.
pub(crate) fn await_measurement(gpu: &Gpu) {
    let kernels = gpu.kernels().expect("the stand-in's kernels");
    HostPaths::of(kernels).expect("the stand-in measures");
    BulkSize::of(kernels).expect("the stand-in measures");
}

fn regions_of(region: &Registered, layout: &KvLayout) -> Vec<Registered> {
    let mut start = 0;
    let parts = layout.region_bytes().iter().map(|&len| {
        let part = match region {
            Registered::Host(region) => region.part(start, len).expect("a part").into(),
            Registered::Device(region) => region.part(start, len).expect("a part").into(),
        };
        start += len;
        part
    });
    parts.collect()
}

/// The byte at one place, different for neighbours in every direction.
pub(crate) fn byte(seed: u64, layer: u64, block: u32, at: u64) -> u8 {
    let x = seed ^ layer << 40 ^ u64::from(block) << 20 ^ at;
    (x.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

fn place(cache: &KvCache, layer: u64, block: u32) -> (usize, u64) {
    let plane = &cache.layout().layers()[layer as usize];
    let region = plane.planes[0].region as usize;
    (region, plane.planes[0].offset + u64::from(block) * plane.block_stride)
}

pub(crate) fn fill(cache: &KvCache, memory: &[Registered], seed: u64) {
    for layer in 0..LAYERS {
        for block in 0..BLOCKS {
            let bytes: Vec<u8> = (0..BLOCK_BYTES).map(|at| byte(seed, layer, block, at)).collect();
            let (region, offset) = place(cache, layer, block);
            memory[region].write_at(offset, &bytes).expect("in range");
        }
    }
}

/// The bytes of one block of one layer.
pub(crate) fn read(cache: &KvCache, memory: &[Registered], layer: u64, block: u32) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK_BYTES as usize];
    let (region, offset) = place(cache, layer, block);
    memory[region].read_at(offset, &mut bytes).expect("in range");
    bytes
}

pub(crate) fn expected(seed: u64, layer: u64, block: u32) -> Vec<u8> {
    (0..BLOCK_BYTES).map(|at| byte(seed, layer, block, at)).collect()
}

pub(crate) fn table(ids: &[u32]) -> BlockTable {
    BlockTable::from_ids(ids)
}

/// A producer and a consumer over one transport, the producer's cache filled with `seed` 1.
pub(crate) struct Pair {
    pub(crate) producer: Engine,
    pub(crate) consumer: Engine,
    pub(crate) source: KvCache,
    pub(crate) target: KvCache,
    pub(crate) peer: Peer,
}

impl Pair {
    pub(crate) fn new(way: impl Into<Way>) -> Self {
        let way = way.into();
        let producer = way.engine("producer");
        let consumer = way.engine("consumer");
        let source = cache(&producer, way.memory[0]);
        let target = cache(&consumer, way.memory[1]);
        fill(&source, source.memory(), 1);
        fill(&target, target.memory(), 2);
        let address = producer.address().expect("listens").to_owned();
        let peer = consumer.connect(&address, Duration::from_secs(30)).expect("connects");
        if let Some(lane) = way.lane {
            lane.check(&peer.links()[0]);
        }
        Self {
            producer,
            consumer,
            source,
            target,
            peer,
        }
    }

    /// What is said of the only transport.
    pub(crate) fn link(&self) -> LinkInfo {
        self.peer.links().remove(0)
    }

    /// Checks that exactly the blocks in `moved` (ours, theirs) came over in these layers.
    pub(crate) fn check(&self, moved: &[(u32, u32)], layers: std::ops::Range<u64>) {
        for layer in 0..LAYERS {
            for block in 0..BLOCKS {
                let from = moved
                    .iter()
                    .find(|(ours, _)| *ours == block)
                    .filter(|_| layers.contains(&layer));
                let want = from.map_or_else(|| expected(2, layer, block), |&(_, theirs)| expected(1, layer, theirs));
                assert_eq!(
                    read(&self.target, self.target.memory(), layer, block),
                    want,
                    "layer {layer} block {block}"
                );
            }
        }
    }
}

pub(crate) const LEASE: Duration = Duration::from_secs(60);
pub(crate) const WAIT: Option<Duration> = Some(Duration::from_secs(60));

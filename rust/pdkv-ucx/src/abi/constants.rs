//! The constants that go with the structs. Values only; what they mean says UCX's `ucp.h`.

macro_rules! constants {
    ($($name:ident: $kind:ty = $value:expr;)+) => {
        $( pub(crate) const $name: $kind = $value; )+
        /// Every constant by its C name, for the comparison with the headers.
        #[cfg(test)]
        pub(crate) const ALL: &[(&str, i128)] = &[ $( (stringify!($name), $value as i128), )+ ];
    };
}

pub(crate) use constants;

constants! {
    UCP_PARAM_FIELD_FEATURES: u64 = 1 << 0;
    UCP_PARAM_FIELD_MT_WORKERS_SHARED: u64 = 1 << 5;
    UCP_PARAM_FIELD_NAME: u64 = 1 << 8;

    UCP_FEATURE_RMA: u64 = 1 << 1;
    UCP_FEATURE_WAKEUP: u64 = 1 << 4;
    UCP_FEATURE_AM: u64 = 1 << 6;

    UCP_ATTR_FIELD_MEMORY_TYPES: u64 = 1 << 2;

    UCP_LIB_ATTR_FIELD_MAX_THREAD_LEVEL: u64 = 1 << 0;

    UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1 << 0;
    UCS_THREAD_MODE_SERIALIZED: u32 = 1;
    UCS_THREAD_MODE_MULTI: u32 = 2;
    UCP_WORKER_PARAM_FIELD_FLAGS: u64 = 1 << 5;
    UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK: u64 = 1 << 0;

    UCP_WORKER_ATTR_FIELD_ADDRESS: u64 = 1 << 1;
    UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER: u64 = 1 << 3;

    UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1 << 0;
    UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
    UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
    UCP_ERR_HANDLING_MODE_NONE: u32 = 0;
    UCP_ERR_HANDLING_MODE_PEER: u32 = 1;

    UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1 << 0;
    UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 1 << 1;
    UCP_MEM_MAP_PARAM_FIELD_PROT: u64 = 1 << 3;
    UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE: u64 = 1 << 4;
    UCP_MEM_MAP_PROT_LOCAL_READ: u32 = 1 << 0;
    UCP_MEM_MAP_PROT_LOCAL_WRITE: u32 = 1 << 1;
    UCP_MEM_MAP_PROT_REMOTE_READ: u32 = 1 << 8;
    UCP_MEM_MAP_PROT_REMOTE_WRITE: u32 = 1 << 9;
    UCS_MEMORY_TYPE_HOST: u32 = 0;
    UCS_MEMORY_TYPE_CUDA: u32 = 1;

    UCP_OP_ATTR_FIELD_CALLBACK: u32 = 1 << 1;
    UCP_OP_ATTR_FIELD_USER_DATA: u32 = 1 << 2;
    UCP_OP_ATTR_FIELD_DATATYPE: u32 = 1 << 3;
    UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
    UCP_OP_ATTR_FIELD_MEMORY_TYPE: u32 = 1 << 6;
    UCP_OP_ATTR_FIELD_MEMH: u32 = 1 << 8;
    UCP_OP_ATTR_FLAG_NO_IMM_CMPL: u32 = 1 << 16;
    UCP_OP_ATTR_FLAG_MULTI_SEND: u32 = 1 << 19;

    UCP_REQUEST_ATTR_FIELD_INFO_STRING: u64 = 1 << 0;
    UCP_REQUEST_ATTR_FIELD_INFO_STRING_SIZE: u64 = 1 << 1;

    UCP_AM_HANDLER_PARAM_FIELD_ID: u64 = 1 << 0;
    UCP_AM_HANDLER_PARAM_FIELD_FLAGS: u64 = 1 << 1;
    UCP_AM_HANDLER_PARAM_FIELD_CB: u64 = 1 << 2;
    UCP_AM_HANDLER_PARAM_FIELD_ARG: u64 = 1 << 3;
    UCP_AM_FLAG_WHOLE_MSG: u32 = 1 << 0;
    UCP_AM_FLAG_PERSISTENT_DATA: u32 = 1 << 1;
    UCP_AM_RECV_ATTR_FLAG_DATA: u64 = 1 << 16;
    UCP_AM_RECV_ATTR_FLAG_RNDV: u64 = 1 << 17;
    UCP_AM_SEND_FLAG_EAGER: u32 = 1 << 1;
    UCP_AM_SEND_FLAG_RNDV: u32 = 1 << 2;

    UCP_DATATYPE_CONTIG: u64 = 0;
    UCP_DATATYPE_IOV: u64 = 2;
    UCP_DATATYPE_SHIFT: u64 = 3;

    UCS_OK: i8 = 0;
    UCS_INPROGRESS: i8 = 1;
    UCS_ERR_NO_RESOURCE: i8 = -2;
    UCS_ERR_IO_ERROR: i8 = -3;
    UCS_ERR_NO_MEMORY: i8 = -4;
    UCS_ERR_INVALID_PARAM: i8 = -5;
    UCS_ERR_UNREACHABLE: i8 = -6;
    UCS_ERR_INVALID_ADDR: i8 = -7;
    UCS_ERR_NOT_IMPLEMENTED: i8 = -8;
    UCS_ERR_MESSAGE_TRUNCATED: i8 = -9;
    UCS_ERR_NO_ELEM: i8 = -12;
    UCS_ERR_NO_DEVICE: i8 = -14;
    UCS_ERR_BUSY: i8 = -15;
    UCS_ERR_CANCELED: i8 = -16;
    UCS_ERR_OUT_OF_RANGE: i8 = -19;
    UCS_ERR_TIMED_OUT: i8 = -20;
    UCS_ERR_EXCEEDS_LIMIT: i8 = -21;
    UCS_ERR_UNSUPPORTED: i8 = -22;
    UCS_ERR_REJECTED: i8 = -23;
    UCS_ERR_NOT_CONNECTED: i8 = -24;
    UCS_ERR_CONNECTION_RESET: i8 = -25;
    UCS_ERR_FIRST_LINK_FAILURE: i8 = -40;
    UCS_ERR_LAST_LINK_FAILURE: i8 = -59;
    UCS_ERR_FIRST_ENDPOINT_FAILURE: i8 = -60;
    UCS_ERR_ENDPOINT_TIMEOUT: i8 = -80;
    UCS_ERR_LAST_ENDPOINT_FAILURE: i8 = -89;
    UCS_ERR_LAST: i8 = -100;

    UCS_LOG_LEVEL_FATAL: u32 = 0;
    UCS_LOG_LEVEL_ERROR: u32 = 1;
    UCS_LOG_LEVEL_WARN: u32 = 2;
    UCS_LOG_LEVEL_DIAG: u32 = 3;
    UCS_LOG_LEVEL_INFO: u32 = 4;
    UCS_LOG_LEVEL_DEBUG: u32 = 5;
    UCS_LOG_FUNC_RC_STOP: u32 = 0;
    UCS_LOG_FUNC_RC_CONTINUE: u32 = 1;
}

/// Constants that the headers have from 1.14 on, of the lanes of an endpoint.
pub(crate) mod transports {
    constants! {
        UCP_EP_ATTR_FIELD_TRANSPORTS: u64 = 1 << 3;
    }
}

// What llama.cpp's passes take on one file: a prompt in ubatches of several sizes, then passes of few columns behind half of it.
//
//     PROGRAM MODEL GPU_LAYERS PROMPT REPEAT [THREADS [REPACK [none|layer|tensor]]]

#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

static double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// milliseconds of n random tokens from position `at` on, with the logits of all or of the last
static double decode(llama_context * ctx, llama_batch & batch, int n_vocab, int n, int at, bool all) {
    batch.n_tokens = n;
    for (int i = 0; i < n; ++i) {
        batch.token[i] = rand() % n_vocab;
        batch.pos[i] = at + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all || i == n - 1;
    }
    const double began = now_ms();
    if (llama_decode(ctx, batch) != 0) {
        fprintf(stderr, "llama_decode failed on %d tokens at %d\n", n, at);
        exit(1);
    }
    llama_synchronize(ctx);
    return now_ms() - began;
}

int main(int argc, char ** argv) {
    if (argc < 5) {
        return 2;
    }
    const int prompt = atoi(argv[3]), repeat = atoi(argv[4]), threads = argc > 5 ? atoi(argv[5]) : 0;
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN) { fputs(text, stderr); }
    }, nullptr);
    llama_backend_init();
    llama_model_params how = llama_model_default_params();
    how.n_gpu_layers = atoi(argv[2]);
    how.use_extra_bufts = argc < 7 || atoi(argv[6]) != 0;
    const std::string split = argc > 7 ? argv[7] : "none";
    how.split_mode = split == "layer" ? LLAMA_SPLIT_MODE_LAYER : split == "tensor" ? LLAMA_SPLIT_MODE_TENSOR : LLAMA_SPLIT_MODE_NONE;
    llama_model * model = llama_model_load_from_file(argv[1], how);
    if (model == nullptr) {
        return 1;
    }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    srand(1);
    for (const int ubatch : { 512, 2048, 4096 }) {
        llama_context_params params = llama_context_default_params();
        params.n_ctx = 2*prompt + 2048;
        params.n_batch = prompt;
        params.n_ubatch = ubatch;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
        if (threads > 0) {
            params.n_threads = params.n_threads_batch = threads;
        }
        llama_context * ctx = llama_init_from_model(model, params);
        if (ctx == nullptr) {
            return 1;
        }
        llama_batch batch = llama_batch_init(prompt, 0, 1);
        llama_memory_t memory = llama_get_memory(ctx);
        double best = 1e9;
        for (int i = 0; i < 4; ++i) {
            llama_memory_clear(memory, true);
            best = std::min(best, decode(ctx, batch, n_vocab, prompt, 0, false));
        }
        printf("prompt of %d, ubatch %d: %.1f ms\n", prompt, ubatch, best);
        for (const int n : { 1, 2, 4, 8, 16, 24 }) {
            if (ubatch != 2048) {
                break;
            }
            llama_memory_clear(memory, true);
            int at = prompt/2;
            decode(ctx, batch, n_vocab, at, 0, false);
            std::vector<double> took;
            for (int i = 0; i < repeat + 3; ++i, at += n) {
                const double ms = decode(ctx, batch, n_vocab, n, at, n > 1);
                if (i >= 3) { took.push_back(ms); }
            }
            std::sort(took.begin(), took.end());
            printf("%2d columns, all logits: %.3f ms median\n", n, took[took.size()/2]);
        }
        fflush(stdout);
        llama_batch_free(batch);
        llama_free(ctx);
    }
    llama_model_free(model);
    return 0;
}
